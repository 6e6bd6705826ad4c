from __future__ import annotations

import dataclasses
import io
import json
import math
import shlex
from typing import TYPE_CHECKING

import pytest

from services.cli.generation_options import OPTIONS
from shared.errors import InvalidRequestError, OverloadedError, UnavailableError
from shared.generation import (
    Delta,
    Finish,
    GenerateOptions,
    GenerateRequest,
    Guidance,
    GuidanceKind,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from shared.messages import FinishReason

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
    assert gateway.requests == [GenerateRequest(["a prompt"], GenerateOptions(max_tokens=128))]
    assert gateway.addresses == ["127.0.0.1:50051"]


ALL_OPTIONS = shlex.split(
    """-n 9 -t 0 --top-k 4 --top-p 0.5 --min-p 0.1 --seed 18446744073709551615 --repetition-penalty 1.5
    --presence-penalty -0.5 --frequency-penalty 2 --logit-bias 7=-100 --logit-bias 0=1.5 --stop ### --stop -x
    --stop-token-id 3 --stop-token-id 0 --ignore-eos --min-tokens 2 --n 3 --best-of 4 --logprobs 5 --regex [ab]+
    --timeout 1.5"""
)


def test_all_options_arrive(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    outcome = orca("generate", "x", *ALL_OPTIONS, "--echo", "--address", "h:1")
    assert outcome.exit_code == 0
    assert gateway.requests == [
        GenerateRequest(
            ["x"],
            GenerateOptions(
                max_tokens=9,
                temperature=0.0,
                top_k=4,
                top_p=0.5,
                min_p=0.1,
                seed=18446744073709551615,
                repetition_penalty=1.5,
                presence_penalty=-0.5,
                frequency_penalty=2.0,
                logit_bias={7: -100.0, 0: 1.5},
                stop=("###", "-x"),
                stop_token_ids=(3, 0),
                ignore_eos=True,
                min_tokens=2,
                n=3,
                best_of=4,
                num_logprobs=5,
                guidance=Guidance(GuidanceKind.REGEX, "[ab]+"),
                timeout_s=1.5,
            ),
            echo=True,
        )
    ]
    assert gateway.addresses == ["h:1"]


def test_every_option_of_the_contract_can_be_given() -> None:
    assert {option.field for option in OPTIONS} == {field.name for field in dataclasses.fields(GenerateOptions)}


def test_the_prompt_may_be_token_ids(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    orca("generate", "--token-ids", "1,2 ,3  4")
    assert gateway.requests[0].prompts == [[1, 2, 3, 4]]


def test_guidance(orca: Callable[..., Outcome], gateway: FakeGateway, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    (tmp_path / "grammar").write_text('start: "é"', encoding="utf-8")
    for arguments, expected in (
        (["--json-object"], Guidance(GuidanceKind.JSON_OBJECT)),
        (["--json-schema", '{"type": "string"}'], Guidance(GuidanceKind.JSON_SCHEMA, '{"type": "string"}')),
        (
            ["--json-schema", str(tmp_path / "schema.json")],
            Guidance(GuidanceKind.JSON_SCHEMA, '{"type": "object"}'),
        ),
        (["--choice", "yes", "--choice", "no"], Guidance(GuidanceKind.CHOICES, choices=("yes", "no"))),
        (["--grammar", str(tmp_path / "grammar")], Guidance(GuidanceKind.GRAMMAR, 'start: "é"')),
    ):
        assert orca("generate", "x", *arguments).exit_code == 0
        assert gateway.requests[-1].options.guidance == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temperature", "warm"], "'--temperature' / '-t': 'warm' is not a number from 0 to 100"),
        (["--temperature", "nan"], "'--temperature' / '-t': 'nan' is not a number from 0 to 100"),
        (["--temperature", "101"], "'101' is not a number from 0 to 100"),
        (["--top-p", "0"], "'--top-p': '0' is not a number above 0 and up to 1"),
        (["--min-p", "1.1"], "'--min-p': '1.1' is not a number from 0 to 1"),
        (["--top-k", "-1"], "'--top-k': '-1' is not a whole number from 0 to 4294967295"),
        (["--top-k", "1e3"], "'--top-k': '1e3' is not a whole number"),
        (["--seed", "18446744073709551616"], "'--seed': '18446744073709551616' is not a whole number"),
        (["--seed", "9" * 5000], "'--seed': "),
        (["--repetition-penalty", "0"], "'--repetition-penalty': '0' is not a number above 0"),
        (["--presence-penalty", "3"], "'--presence-penalty': '3' is not a number from -2 to 2"),
        (["--frequency-penalty", "inf"], "'--frequency-penalty': 'inf' is not a number from -2 to 2"),
        (["--logit-bias", "7"], "'--logit-bias': '7' is not ID=VALUE"),
        (["--logit-bias", "x=1"], "'--logit-bias': 'x' is not a whole number"),
        (["--logit-bias", "7=101"], "'--logit-bias': '101' is not a number from -100 to 100"),
        (["--stop", ""], "'--stop': the text is empty"),
        (["--stop-token-id", "-1"], "'--stop-token-id': '-1' is not a whole number"),
        (["--max-tokens", "x"], "'--max-tokens' / '-n': 'x' is not a whole number"),
        (["--min-tokens", "129"], "--min-tokens 129 is above --max-tokens 128"),
        (["--n", "0"], "'--n': '0' is not a whole number from 1 to 128"),
        (["--n", "3", "--best-of", "2"], "--best-of 2 is below --n 3"),
        (["--logprobs", "21"], "'--logprobs': '21' is not a whole number from 0 to 20"),
        (["--timeout", "0"], "'--timeout': '0' is not a number above 0"),
        (["--regex", "a", "--json-object"], "--json-object and --regex exclude each other"),
        (["--json-schema", "{"], "'--json-schema': the schema is not JSON"),
        (["--json-schema", "nowhere.json"], "'--json-schema': cannot read 'nowhere.json': No such file"),
        (["--grammar", "nowhere.lark"], "'--grammar': cannot read 'nowhere.lark': No such file"),
        (["--grammar", "a\0b"], "'--grammar': cannot read"),
        (["--token-ids", "1,x"], "'--token-ids': 'x' is not a whole number"),
        (["--token-ids", " ,"], "'--token-ids': there is no token id"),
        (["--token-ids", "1"], "give either PROMPT or --token-ids, not both"),
    ],
)
def test_bad_values_name_their_option(
    orca: Callable[..., Outcome], gateway: FakeGateway, arguments: list[str], said: str
) -> None:
    outcome = orca("generate", "x", *arguments)
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert said in outcome.err
    assert gateway.requests == []


def test_files_have_a_bound(orca: Callable[..., Outcome], gateway: FakeGateway, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * (2**20 + 1))
    (tmp_path / "binary").write_bytes(b"abc\xff")
    (tmp_path / "list").write_bytes(b"[1]")
    for option, name, said in (
        ("--grammar", "large", "has more than 1048576 bytes"),
        ("--grammar", "binary", "is not UTF-8 text (byte 3)"),
        ("--json-schema", "list", "the schema is not a JSON object"),
    ):
        outcome = orca("generate", "x", option, str(tmp_path / name))
        assert outcome.exit_code == 2
        assert said in " ".join(outcome.err.replace("│", "").split())


def test_json_is_one_object_a_line(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    first = {"choice": 0, "text": "Once ", "token_ids": [5, 6], "request_id": "r1"}
    finish = {
        "reason": "stop",
        "num_output_tokens": 4,
        "queue_ms": 0.5,
        "prefill_ms": 1.5,
        "decode_ms": 2.5,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
        "stop": 2,
    }
    last = {
        "choice": 0,
        "text": "",
        "token_ids": [2],
        "finish": finish,
        "usage": {"num_prompt_tokens": 3, "num_output_tokens": 4, "num_cached_tokens": 1},
    }
    lines = [json.loads(line) for line in orca("generate", "x", "--json").out.splitlines()]
    assert lines == [first, {"choice": 0, "text": "más", "token_ids": [7]}, last]


def test_json_has_all_that_a_delta_has(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    top = (TopLogprob(9, "\ufffd", b"\xc3", -1.5),)
    logprobs = (TokenLogprob(7, "a", b"a", None), TokenLogprob(8, "b", b"b", -0.5, top))
    gateway.deltas = (
        Delta("ab", (7, 8), choice=1, is_prompt=True, logprobs=logprobs, tool_calls=(ToolCallDelta(0, "c", "f", "{"),)),
    )
    shown = [
        {"token_id": 7, "token": "a", "token_bytes": [97], "logprob": None},
        {
            "token_id": 8,
            "token": "b",
            "token_bytes": [98],
            "logprob": -0.5,
            "top": [{"token_id": 9, "token": "\ufffd", "token_bytes": [0xC3], "logprob": -1.5}],
        },
    ]
    assert json.loads(orca("generate", "x", "--json").out) == {
        "choice": 1,
        "text": "ab",
        "token_ids": [7, 8],
        "is_prompt": True,
        "logprobs": shown,
        "tool_calls": [{"index": 0, "id": "c", "name": "f", "arguments": "{"}],
    }


def test_choices_are_printed_one_after_the_other(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    finish = Finish(FinishReason.LENGTH, 2, 0, 0, 0)
    gateway.deltas = (
        Delta(request_id="r"),
        Delta("b1", (1,), choice=1),
        Delta("a1 ", (1,)),
        Delta("b2", (2,), finish, choice=1),
        Delta("a2", (2,), finish, usage=Usage(1, 4)),
    )
    lines = orca("generate", "x", "--n", "2").out.splitlines()
    assert [line.strip("─ ") for line in lines] == ["choice 1 of 2", "a1 a2", "choice 2 of 2", "b1b2"]


def test_log_probabilities_are_a_table(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    top = (TopLogprob(7, " a", b" a", math.log(0.5)), TopLogprob(8, "[b]", b"[b]", math.log(0.25)))
    gateway.deltas = (
        Delta(" a", (7,), logprobs=(TokenLogprob(7, " a", b" a", math.log(0.5), top),)),
        Delta("", (2,), Finish(FinishReason.STOP, 1, 0, 0, 0), logprobs=(TokenLogprob(2, "", b"", None),)),
    )
    text, head, first, second = orca("generate", "x", "--logprobs", "2").out.splitlines()
    assert text == " a"
    assert head.split() == ["token", "id", "probability", "log", "likeliest"]
    assert first.split() == ["'", "a'", "7", "50.0%", "-0.693", "'", "a'", "50.0%", "'[b]'", "25.0%"]
    assert second.split() == ["''", "2"]


@pytest.mark.parametrize("arguments", [(), ("-",), ("--file", "-")])
def test_the_prompt_may_come_from_standard_input(
    orca: Callable[..., Outcome], gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    type_in(monkeypatch, "zwei\nZeilen ü\n".encode())
    assert orca("generate", *arguments).exit_code == 0
    assert gateway.requests[0].prompts == ["zwei\nZeilen ü"]


def test_the_prompt_may_come_from_a_file(orca: Callable[..., Outcome], gateway: FakeGateway, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"one\n\n")
    orca("generate", "--file", str(tmp_path / "prompt"))
    assert gateway.requests[0].prompts == ["one\n"]


def test_prompts_that_cannot_be(
    orca: Callable[..., Outcome], gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "binary").write_bytes(b"abc\xff")
    type_in(monkeypatch, b"", terminal=True)
    for arguments, said in (
        (("x", "--file", "y"), "not both"),
        (("", "--file", "y"), "not both"),
        ((), "give a prompt, for example"),
        (("--file", str(tmp_path / "none")), "No such file"),
        (("--file", str(tmp_path)), "Is a directory"),
        (("--file", str(tmp_path / "binary")), "not UTF-8 text (byte 3)"),
    ):
        outcome = orca("generate", *arguments)
        assert outcome.exit_code == 2
        assert said in outcome.err
    assert gateway.requests == []


def test_prompts_have_a_bound(
    orca: Callable[..., Outcome], gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.generate._MAX_PROMPT_BYTES", 4)
    (tmp_path / "prompt").write_bytes(b"12345")
    type_in(monkeypatch, b"12345")
    for arguments in (("--file", str(tmp_path / "prompt")), ("-",)):
        outcome = orca("generate", *arguments)
        assert outcome.exit_code == 2
        assert "the prompt has more than 4 bytes" in outcome.err
    assert gateway.requests == []


def test_a_narrow_encoding_loses_characters_only(
    orca: Callable[..., Outcome], gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, encoding="ascii"))
    assert orca("generate", "x").exit_code == 0
    assert out.getvalue() == b"Once m?s"


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
    assert gateway.num_cancelled == 1


def test_a_reader_that_has_gone_is_no_news(
    orca: Callable[..., Outcome], gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.stdout", ClosedPipe())
    outcome = orca("generate", "x")
    assert (outcome.exit_code, outcome.err) == (1, "")
