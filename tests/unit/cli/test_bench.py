"""Options of `orca bench serve` and its reports, without a server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import typer

from bench.load.benchmark import Benchmark, BenchmarkConfig
from bench.load.request_options import PromptFormat
from bench.load.words import NUM_WORDS
from services.cli.bench import _vocab_size
from services.cli.bench_options import json_object, report_path, request_rate
from shared.errors import OrcaError, UnauthenticatedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.load.endpoint import Endpoint
    from bench.load.request_options import RequestOptions
    from bench.load.traces import TraceConfig
    from tests.unit.cli.conftest import Outcome  # only for the type checker


def test_text_is_drawn_from_each_word_once() -> None:
    assert _vocab_size(PromptFormat.TEXT, 5, "") == 100 + NUM_WORDS


@pytest.mark.parametrize("text", ["Infinity", "1e999", "1e-320", "nan", "0", "-1", "2e6"])
def test_rates_that_nobody_can_keep_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a number from 1e-06 to 1e\\+06"):
        request_rate(text)


def test_rates() -> None:
    assert [request_rate(text) for text in ("inf", "1e-6", "4.5", "1e6")] == [None, 1e-6, 4.5, 1e6]


@pytest.mark.parametrize(
    "text", ['{"a": 1180591620717411303424}', r'{"a": "\ud800"}', '{"a": ' + "[" * 254 + "]" * 254 + "}"]
)
def test_a_body_that_cannot_be_sent_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="it cannot be sent"):
        json_object(text)


def test_where_nobody_may_write_is_found_out_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    assert report_path(str(path)) == path
    asked: list[Path] = []
    monkeypatch.setattr("os.access", lambda asked_path, _mode: asked.append(asked_path))
    with pytest.raises(typer.BadParameter, match="permission denied"):
        report_path(str(path))
    path.touch()
    with pytest.raises(typer.BadParameter, match="permission denied"):
        report_path(str(path))
    assert asked == [tmp_path, path]


def test_details_without_a_report_that_has_them_are_refused(orca: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = orca("bench", "serve", "--save-detailed", "--report", str(tmp_path / "x.png"))
    assert outcome.exit_code == 2
    assert "--save-detailed adds to a JSON report" in outcome.err


def test_a_report_that_cannot_be_written_takes_no_other_along(
    orca: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, kept = tmp_path / "lost" / "report.json", tmp_path / "kept.json"
    lost.parent.mkdir()

    async def measure(
        endpoint: Endpoint, options: RequestOptions, trace: TraceConfig, vocab_size: int, *_: object
    ) -> Benchmark:
        lost.parent.rmdir()
        return Benchmark(BenchmarkConfig(endpoint, options, trace, vocab_size, []), [])

    monkeypatch.setattr("services.cli.bench._measure", measure)
    outcome = orca(*("bench", "serve", "--json", "--vocab-size", "9", "--report", str(lost), "--report", str(kept)))
    assert outcome.exit_code == 1
    assert "No such file" in outcome.err
    assert json.loads(kept.read_text(encoding="utf-8")) == json.loads(outcome.out)


def test_what_is_for_a_mesh_of_one_s_own_goes_to_no_other_server(
    orca: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Endpoint] = []

    async def measure(endpoint: Endpoint, *_: Any) -> Benchmark:
        seen.append(endpoint)
        raise OrcaError("enough")

    monkeypatch.setattr("services.cli.bench._measure", measure)
    for name in ("API_KEY", "TLS_CA", "CLIENT_CERT", "CLIENT_KEY"):
        monkeypatch.setenv(f"ORCA_{name}", "secret")
    orca("bench", "serve", "-u", "https://a-host")
    for name in ("API_KEY", "TLS_CA", "CLIENT_CERT", "CLIENT_KEY"):
        monkeypatch.setenv(f"ORCA_BENCH_{name}", name)
    orca("bench", "serve", "-u", "https://a-host")
    mine, theirs = seen
    assert (mine.api_key, mine.tls) == ("", None)
    assert theirs.api_key == "API_KEY"
    assert theirs.tls
    assert (theirs.tls.authorities, theirs.tls.certificate, theirs.tls.private_key) == (
        "TLS_CA",
        "CLIENT_CERT",
        "CLIENT_KEY",
    )
    shown = orca("bench", "serve", "--help").out
    assert "ORCA_BENCH_API_KEY" in shown
    assert "ORCA_BENCH_TLS_CA" in shown


def test_where_its_key_is_given_is_told(orca: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(*_: Any) -> Benchmark:
        raise UnauthenticatedError("an API key is required")

    monkeypatch.setattr("services.cli.bench._measure", measure)
    outcome = orca("bench", "serve", "-u", "grpc://a-host:1")
    assert outcome.exit_code == 1
    assert "give yours in ORCA_BENCH_API_KEY, or with --api-key" in outcome.err
