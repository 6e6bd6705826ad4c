from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest

from shared.client import GenerateOptions
from shared.errors import InvalidRequestError, OverloadedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.cli.conftest import FakeGateway, Outcome  # only for the type checker


def type_in(monkeypatch: pytest.MonkeyPatch, data: bytes, *, terminal: bool = False) -> None:
    stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    monkeypatch.setattr(stream.buffer, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stdin", stream)


def test_text_is_printed_as_it_is(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    outcome = orca("generate", "a prompt")
    assert outcome == (0, "Once más", "")
    assert gateway.asked == [("a prompt", GenerateOptions(max_tokens=128))]
    assert gateway.addresses == ["127.0.0.1:50051"]


def test_all_options_arrive(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    sampling = (
        "-n",
        "9",
        "-t",
        "0",
        "--top-k",
        "4",
        "--top-p",
        "0.5",
        "--min-p",
        "0.1",
        "--seed",
        "18446744073709551615",
    )
    stops = ("--ignore-eos", "--stop-token-id", "3", "--stop-token-id", "0")
    orca("generate", "x", *sampling, *stops, "--address", "h:1")
    assert gateway.asked[0][1] == GenerateOptions(
        max_tokens=9,
        temperature=0.0,
        top_k=4,
        top_p=0.5,
        min_p=0.1,
        seed=18446744073709551615,
        stop_token_ids=(3, 0),
        ignore_eos=True,
    )
    assert gateway.addresses == ["h:1"]


def test_json_is_one_object_a_line(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    lines = [json.loads(line) for line in orca("generate", "x", "--json").out.splitlines()]
    assert lines == [
        {"request_id": "r1", "text": "Once ", "token_ids": [5, 6]},
        {"text": "más", "token_ids": [7]},
        {
            "text": "",
            "token_ids": [2],
            "finish_reason": "stop",
            "usage": {"num_prompt_tokens": 3, "num_output_tokens": 4, "num_cached_tokens": 1},
            "timing": {"queue_ms": 0.5, "prefill_ms": 1.5, "decode_ms": 2.5},
        },
    ]


@pytest.mark.parametrize("arguments", [(), ("-",), ("--file", "-")])
def test_the_prompt_may_come_from_standard_input(
    orca: Callable[..., Outcome], gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    type_in(monkeypatch, "zwei\nZeilen ü\n".encode())
    assert orca("generate", *arguments).exit_code == 0
    assert gateway.asked[0][0] == "zwei\nZeilen ü"


def test_the_prompt_may_come_from_a_file(orca: Callable[..., Outcome], gateway: FakeGateway, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"one\n\n")
    orca("generate", "--file", str(tmp_path / "prompt"))
    assert gateway.asked[0][0] == "one\n"


def test_prompts_that_cannot_be(
    orca: Callable[..., Outcome], gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "binary").write_bytes(b"abc\xff")
    type_in(monkeypatch, b"", terminal=True)
    for arguments, said in (
        (("x", "--file", "y"), "not both"),
        ((), "give a prompt, for example"),
        (("--file", str(tmp_path / "none")), "No such file"),
        (("--file", str(tmp_path)), "Is a directory"),
        (("--file", str(tmp_path / "binary")), "not UTF-8 text (byte 3)"),
    ):
        outcome = orca("generate", *arguments)
        assert outcome.exit_code == 2
        assert said in outcome.err
    assert gateway.asked == []


def test_nobody_there(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    gateway.deltas = ()
    gateway.failure = UnavailableError("gateway at h:1: failed to connect to all addresses; last error: UNKNOWN")
    outcome = orca("generate", "x", "-a", "h:1")
    assert outcome.exit_code == 1
    assert outcome.err == (
        "error: no gateway answers at h:1: start a mesh with `orca up`, or name another address with --address\n"
    )


@pytest.mark.parametrize(
    "failure", [UnavailableError("the gateway is draining"), OverloadedError("full"), InvalidRequestError("top_p: 3")]
)
def test_other_failures_are_told_as_they_are(
    orca: Callable[..., Outcome], gateway: FakeGateway, failure: Exception
) -> None:
    gateway.failure = failure
    outcome = orca("generate", "x")
    assert outcome == (1, "Once más", f"error: {failure}\n")


def test_ctrl_c_leaves_with_130(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    gateway.failure = KeyboardInterrupt()
    outcome = orca("generate", "x")
    assert outcome == (130, "Once más", "")


def test_a_reader_that_has_gone_is_no_news(
    orca: Callable[..., Outcome], gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.stdout", ClosedPipe())
    outcome = orca("generate", "x")
    assert (outcome.exit_code, outcome.err) == (1, "")
