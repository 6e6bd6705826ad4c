"""A gateway's metrics balance, however its requests end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.metrics import GatewayMetrics
from services.gateway.observation import RequestRecord
from services.gateway.request_limit import RequestLimit
from shared.generation import Finish
from shared.messages import FinishReason
from shared.metrics import ServiceMetrics
from shared.status import StatusCode
from tests.exposition import Exposition, faults

if TYPE_CHECKING:
    from collections.abc import Sequence

SECOND_NS = 10**9
REASONS = {"stop", "length", "tool_calls", "mixed", "cancelled", "deadline", "refused", "error"}


def make_finish(reason: FinishReason, num_output_tokens: int = 5, decode_ms: float = 40.0) -> Finish:
    return Finish(reason, num_output_tokens, queue_ms=1.0, prefill_ms=2.0, decode_ms=decode_ms)


class Gateway:
    """Metrics, and what they are told."""

    def __init__(self) -> None:
        self.metrics = GatewayMetrics(RequestLimit(8))
        self.service = ServiceMetrics("gateway")
        self.service.add(self.metrics)

    def receive(self, method: str = "Generate") -> RequestRecord:
        record = RequestRecord(method=method, client="anonymous", received_ns=SECOND_NS)
        self.metrics.received(record)
        return record

    def end(
        self, record: RequestRecord, code: StatusCode, reasons: Sequence[FinishReason] = (), *, accepted: bool = True
    ) -> None:
        record.code = code
        record.finishes = [make_finish(reason) for reason in reasons]
        record.num_prompt_tokens = 7 if accepted else 0
        record.num_output_tokens = 5 * len(reasons)
        record.ended_ns = 3 * SECOND_NS
        self.metrics.ended(record)

    def scrape(self) -> Exposition:
        body, content_type = self.service.render()
        return Exposition.of(body.decode(), content_type)


finish_reasons = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS])
steps = st.one_of(
    st.tuples(st.just("receive"), st.sampled_from(["Generate", "Chat"])),
    st.tuples(
        st.just("end"),
        st.integers(0, 100),
        st.sampled_from(StatusCode),
        st.lists(finish_reasons, max_size=3),
        st.booleans(),
    ),
)


@given(st.lists(steps, max_size=40))
@settings(deadline=None, max_examples=50)
def test_received_is_ended_and_in_flight(script: list[tuple[object, ...]]) -> None:
    gateway, open_requests = Gateway(), list[RequestRecord]()
    num_received = num_ended = 0
    for step in script:
        match step:
            case ("receive", str(method)):
                open_requests.append(gateway.receive(method))
                num_received += 1
            case ("end", int(which), StatusCode() as code, list(reasons), bool(accepted)) if open_requests:
                gateway.end(open_requests.pop(which % len(open_requests)), code, reasons, accepted=accepted)
                num_ended += 1
            case _:
                continue
        found = gateway.scrape()
        assert found.total("orca_requests_received_total") == num_received
        assert found.total("orca_requests_ended_total") == num_ended
        assert found.value("orca_requests_in_flight") == len(open_requests)
        assert found.total("orca_requests_received_total") == (
            found.total("orca_requests_ended_total") + found.value("orca_requests_in_flight")
        )
        assert found.value("orca_e2e_request_latency_seconds_count") == num_ended
        assert {labels["reason"] for labels, _ in found.values("orca_requests_ended_total")} <= REASONS
        assert not faults(found)


@pytest.mark.parametrize(
    ("code", "reasons", "accepted", "reason"),
    [
        (StatusCode.OK, [FinishReason.STOP], True, "stop"),
        (StatusCode.OK, [FinishReason.LENGTH, FinishReason.LENGTH], True, "length"),
        (StatusCode.OK, [FinishReason.TOOL_CALLS], True, "tool_calls"),
        (StatusCode.OK, [FinishReason.STOP, FinishReason.LENGTH], True, "mixed"),
        (StatusCode.OK, [], True, "length"),
        (StatusCode.CANCELLED, [FinishReason.STOP], True, "cancelled"),
        (StatusCode.DEADLINE_EXCEEDED, [], True, "deadline"),
        (StatusCode.INVALID_ARGUMENT, [], False, "refused"),
        (StatusCode.RESOURCE_EXHAUSTED, [], True, "refused"),
        (StatusCode.UNAVAILABLE, [], False, "refused"),
        (StatusCode.UNAVAILABLE, [], True, "error"),
        (StatusCode.INTERNAL, [], False, "error"),
    ],
)
def test_how_it_ended_in_one_word(code: StatusCode, reasons: list[FinishReason], accepted: bool, reason: str) -> None:
    gateway = Gateway()
    gateway.end(gateway.receive(), code, reasons, accepted=accepted)
    found = gateway.scrape()
    assert found.value("orca_requests_ended_total", reason=reason, code=code.name) == 1


def test_what_clients_waited_for() -> None:
    gateway = Gateway()
    record = gateway.receive("Chat")
    record.first_token_ns = SECOND_NS + SECOND_NS // 2
    gateway.metrics.first_token(record)
    gateway.metrics.more_tokens(SECOND_NS // 100, 3)
    gateway.end(record, StatusCode.OK, [FinishReason.STOP])
    found = gateway.scrape()
    assert found.value("orca_requests_received_total", method="Chat") == 1
    assert found.value("orca_time_to_first_token_seconds_sum") == 0.5
    assert found.value("orca_inter_token_latency_seconds_count") == 3
    assert found.value("orca_inter_token_latency_seconds_sum") == pytest.approx(0.03)
    assert found.value("orca_time_per_output_token_seconds_sum") == pytest.approx(0.01)
    assert found.value("orca_e2e_request_latency_seconds_sum") == 2
    assert found.value("orca_request_prompt_tokens_sum") == 7
    assert found.value("orca_request_generation_tokens_sum") == 5


def test_usual_endings_are_told_from_the_start() -> None:
    found = Gateway().scrape()
    assert found.total("orca_requests_ended_total") == 0
    assert len(found.values("orca_requests_ended_total")) >= 8
