from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from shared.client import GatewayStatus
from shared.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.cli.conftest import FakeGateway, Outcome  # only for the type checker


def test_at_a_glance(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    outcome = orca("status")
    assert outcome.exit_code == 0
    for said in (
        "ready",
        "tiny, float32, context 512 tokens",
        "2 × 1 (pipeline stages × tensor-parallel ranks)",
        "4096 tokens: 96 used, 32 cached, 3968 free; blocks of 16",
        "25% of prompt tokens found (50 of 200)",
        "2 running, 1 waiting (1 preempted), 9 finished",
        "2 in flight, 77 in all, epoch 3",
        "2 requests, 17 tokens",
        "1234 tokens",
        "127.0.0.1:7002",
        "weights 40 %",
    ):
        assert said in outcome.out


def test_not_ready_says_why(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    engine = replace(gateway.status.engine, ready=False, reason="waiting for workers: stage 1 rank 0", info=None)
    gateway.status = GatewayStatus(engine, 0)
    assert "not ready: waiting for workers: stage 1 rank 0" in orca("status").out


def test_json(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    found = json.loads(orca("status", "--json").out)
    assert found["engine"]["info"]["num_stages"] == 2
    assert found["engine"]["workers"][1]["state"] == "loading"
    assert found["num_gateway_requests"] == 3


def test_nobody_there(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    gateway.failure = UnavailableError("gateway at h:1: failed to connect to all addresses")
    outcome = orca("status", "-a", "h:1")
    assert outcome.exit_code == 1
    assert outcome.err.startswith("error: no gateway answers at h:1")
