"""``orca bench``: load on a server, and what it measured."""

import asyncio
import contextlib
import json
import resource
import signal
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.load.request_options import Api, PromptFormat, RequestOptions
from bench.load.traces import NUM_RESERVED_IDS, TraceConfig
from services.cli.bench_options import (
    API_KEY_VARIABLE,
    ExtraBodyOption,
    GoodputOption,
    Load,
    ReportOption,
    takes_endpoint,
    takes_load,
    takes_trace,
)
from services.cli.calls import told_plainly
from shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence
    from pathlib import Path

    from bench.load.benchmark import Benchmark
    from bench.load.endpoint import Endpoint
    from bench.load.goodput import LatencyBound
    from services.cli.bench_view import BenchView

__all__ = ["bench"]

_MAX_FILES = 65_536

bench = typer.Typer(name="bench", help="Measure servers.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    pass


@bench.command()
@takes_endpoint
@takes_trace
@takes_load
def serve(
    endpoint: "Endpoint",
    trace: TraceConfig,
    load: Load,
    model: Annotated[
        str, typer.Option("--model", "-m", show_default="the first that is served", help="Name of the model to ask.")
    ] = "",
    api: Annotated[
        Api, typer.Option("--api", help="Prompts to continue, or conversations of one question.")
    ] = Api.COMPLETIONS,
    prompt_format: Annotated[
        PromptFormat | None,
        typer.Option(
            "--prompt-format",
            show_default="token-ids; text for conversations",
            rich_help_panel="Trace",
            help="Token ids as drawn, or words in their place, for servers that take no ids.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            min=1,
            max=10_000_000,
            show_default="what the endpoint tells",
            rich_help_panel="Trace",
            help="Token ids are below it.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", min=0, max=100, rich_help_panel="Trace", help="0 is greedy.")
    ] = 0.0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            rich_help_panel="Trace",
            help="Outputs are as long as the trace wants; not in OpenAI's own API.",
        ),
    ] = True,
    extra_body: ExtraBodyOption = None,
    goodput: GoodputOption = None,
    report: ReportOption = None,
    label: Annotated[
        str,
        typer.Option(
            "--label", show_default=False, rich_help_panel="Report", help="Name of this benchmark in reports."
        ),
    ] = "",
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", rich_help_panel="Report", help="Have each request in the JSON, too.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Report", help="Print the JSON report instead of tables.")
    ] = False,
) -> None:
    """Put load on a server of OpenAI's API or on an orca mesh, and tell latencies, throughput and goodput.

    Ctrl-C ends it with what there is so far. Exit code 1 where requests failed.
    """
    from services.cli.bench_view import BenchView

    if save_detailed and not as_json and not any(path.suffix == ".json" for path in report or ()):
        raise ConfigError("--save-detailed adds to a JSON report: give --report FILE.json, or --json")
    if any(path.suffix == ".png" for path in report or ()):
        from bench.load.plot import check_can_plot

        check_can_plot()
    chosen_format = prompt_format or (PromptFormat.TEXT if api is Api.CHAT else PromptFormat.TOKEN_IDS)
    options = RequestOptions(model, api, chosen_format, temperature, ignore_eos, extra_body or {})
    view = BenchView(is_quiet=as_json)
    told = told_plainly(endpoint.address, option="--base-url", key_variable=API_KEY_VARIABLE)
    with told if endpoint.is_grpc else contextlib.nullcontext():
        benchmark = _run(_measure(endpoint, options, trace, vocab_size, load, goodput or (), view))
    found = _report_of(benchmark, label, detailed=save_detailed)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        view.show(benchmark)
    failures = []
    for path in report or ():
        try:
            _write(benchmark, found, path, label)
        except OSError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    if view.was_stopped:
        raise typer.Exit(130)
    if any(run.summary.num_failed for run in benchmark.runs):
        raise typer.Exit(1)


def _report_of(benchmark: "Benchmark", label: str, *, detailed: bool) -> dict[str, Any]:
    from bench.load.report import report_of

    return report_of(benchmark, created=datetime.now(UTC), version=version("orca-mesh"), label=label, detailed=detailed)


def _write(benchmark: "Benchmark", found: dict[str, Any], path: "Path", label: str) -> None:
    if path.suffix == ".png":
        from bench.load.plot import plot

        plot(benchmark, path, label=label)
    else:
        from bench.load.report import write_json

        write_json(found, path)


def _run(measuring: "Coroutine[Any, Any, Benchmark]") -> "Benchmark":
    from shared.lifecycle import new_event_loop

    # Each request in flight over HTTP has a connection; the usual limit of 1,024 files would be found out as failures.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(measuring)


async def _measure(
    endpoint: "Endpoint",
    options: RequestOptions,
    trace: TraceConfig,
    vocab_size: int | None,
    load: Load,
    bounds: "Sequence[LatencyBound]",
    view: "BenchView",
) -> "Benchmark":
    from bench.load.benchmark import BenchmarkConfig, LoadLevel, check_fits, run_benchmark
    from bench.load.client import find_model

    model = await find_model(endpoint, options.model)
    check_fits(trace, model)
    config = BenchmarkConfig(
        endpoint=endpoint,
        options=replace(options, model=model.name),
        trace=trace,
        vocab_size=_vocab_size(options.prompt_format, vocab_size or model.vocab_size, endpoint.url),
        levels=[LoadLevel(*level) for level in product(load.request_rates, load.max_concurrencies)],
        burstiness=load.burstiness,
        num_warmups=load.num_warmups,
        timeout_s=load.timeout_s,
        bounds=bounds,
    )
    with _stopped_by_signals(view.stop), view.watching():
        return await run_benchmark(config, view, view.stop)


@contextlib.contextmanager
def _stopped_by_signals(stop: asyncio.Event) -> "Iterator[None]":
    """Set ``stop`` on Ctrl-C and SIGTERM."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _vocab_size(prompt_format: PromptFormat, known: int | None, url: str) -> int:
    from bench.load.words import NUM_WORDS

    if prompt_format is PromptFormat.TEXT:
        return NUM_RESERVED_IDS + NUM_WORDS  # each word once, for no prompt has the first ids
    if known is None:
        raise ConfigError(
            f"{url} does not tell how large its vocabulary is: give --vocab-size, or --prompt-format text for words"
        )
    return known
