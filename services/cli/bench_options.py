"""Options of ``orca bench serve``: where load goes, what is asked, how much of it; named as vLLM names them."""

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.load.traces import LengthRange, TraceConfig, TraceName
from services.cli.connection import client_tls
from services.cli.option_group import taking
from services.cli.option_values import number, whole_number
from shared.errors import ConfigError

if TYPE_CHECKING:
    from bench.load.endpoint import Endpoint
    from bench.load.goodput import LatencyBound

__all__ = [
    "API_KEY_VARIABLE",
    "ExtraBodyOption",
    "GoodputOption",
    "Load",
    "ReportOption",
    "takes_endpoint",
    "takes_load",
    "takes_trace",
]

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
API_KEY_VARIABLE = "ORCA_BENCH_API_KEY"

_CONNECTION = "Connection"
_TRACE = "Trace"
_LOAD = "Load"
_REPORT = "Report"
_MAX_REQUESTS = 100_000
_MAX_LEN = 1_000_000
_MAX_LEVELS = 100
_MIN_RATE = 1e-6
_MAX_RATE = 1e6


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked at a time; each rate goes with each concurrency."""

    request_rates: tuple[float | None, ...]
    """None: a closed loop."""
    max_concurrencies: tuple[int | None, ...]
    """None: no limit."""
    burstiness: float
    num_warmups: int
    timeout_s: float


def length_range(text: str) -> LengthRange:
    """``LOW-HIGH`` tokens, or one number."""
    low, dash, high = text.partition("-")
    length = whole_number(1, _MAX_LEN)
    try:
        return LengthRange(length(low), length(high if dash else low))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def listed(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Values with commas between them."""

    def parse_all(text: str) -> tuple[Any, ...]:
        values = tuple(parse(part.strip()) for part in text.split(","))
        if len(values) > _MAX_LEVELS:
            raise typer.BadParameter(f"more than {_MAX_LEVELS} values")
        return values

    return parse_all


def request_rate(text: str) -> float | None:
    """Requests per second; ``inf`` is a closed loop."""
    return None if text == "inf" else number(_MIN_RATE, _MAX_RATE)(text)


def latency_bound(text: str) -> "LatencyBound":
    """``METRIC:MILLISECONDS``."""
    from bench.load.goodput import LatencyBound

    try:
        return LatencyBound.parse(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def report_path(text: str) -> Path:
    """A file to write whose name says its format, in a folder that is there."""
    path = Path(text)
    if path.suffix not in {".json", ".png"}:
        raise typer.BadParameter(f"{text!r} ends neither in .json nor in .png")
    if path.is_dir() or not path.parent.is_dir():
        raise typer.BadParameter(f"{text!r} cannot be written: its folder is not there, or it is one")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{text!r} cannot be written: permission denied")
    return path


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    import orjson

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter("it is not a JSON object")
    try:
        orjson.dumps([[value]])  # it is as deep in a report, and less so in a request
    except TypeError as error:
        raise typer.BadParameter(f"it cannot be sent: {error}") from error
    return value


GoodputOption = Annotated[
    list[Any] | None,
    typer.Option(
        "--goodput",
        parser=latency_bound,
        metavar="METRIC:MS",
        show_default=False,
        rich_help_panel=_REPORT,
        help="Count requests that kept this latency, for example ttft:500; metrics are ttft, tpot, e2e and normalised. "
        "May be given several times: all must be kept.",
    ),
]
ReportOption = Annotated[
    list[Any] | None,
    typer.Option(
        "--report",
        parser=report_path,
        metavar="FILE",
        show_default=False,
        rich_help_panel=_REPORT,
        help="Write a report: numbers as .json, curves as .png (needs matplotlib). May be given several times.",
    ),
]
ExtraBodyOption = Annotated[
    Any,
    typer.Option(
        "--extra-body",
        parser=json_object,
        metavar="JSON",
        show_default=False,
        rich_help_panel=_TRACE,
        help="More fields of each request's body, over HTTP.",
    ),
]


def _endpoint(
    *,
    base_url: Annotated[
        str,
        typer.Option(
            "--base-url",
            "-u",
            envvar="ORCA_BASE_URL",
            metavar="URL",
            help="Where to: http:// or https:// for OpenAI's API, with or without /v1; grpc:// or grpcs:// for orca's.",
        ),
    ] = DEFAULT_BASE_URL,
    # Their variables are not those of the other commands: what is for a mesh of one's own goes to no other server.
    tls_ca: Annotated[
        str,
        typer.Option(
            "--tls-ca",
            envvar="ORCA_BENCH_TLS_CA",
            metavar="FILE",
            show_default=False,
            rich_help_panel=_CONNECTION,
            help="Authorities, in PEM, that vouch for the server; without it those that are publicly trusted.",
        ),
    ] = "",
    client_cert: Annotated[
        str,
        typer.Option(
            "--client-cert",
            envvar="ORCA_BENCH_CLIENT_CERT",
            metavar="FILE",
            show_default=False,
            rich_help_panel=_CONNECTION,
            help="Certificate of your own, in PEM, where one is asked for.",
        ),
    ] = "",
    client_key: Annotated[
        str,
        typer.Option(
            "--client-key",
            envvar="ORCA_BENCH_CLIENT_KEY",
            metavar="FILE",
            show_default=False,
            rich_help_panel=_CONNECTION,
            help="Private key of --client-cert, in PEM without a password.",
        ),
    ] = "",
    api_key: Annotated[
        str,
        typer.Option(
            "--api-key",
            envvar=API_KEY_VARIABLE,
            metavar="KEY",
            show_default=False,
            rich_help_panel=_CONNECTION,
            help="API key, where one is asked for; others on this host see it, unless it is given in the variable. "
            "ORCA_API_KEY is not read.",
        ),
    ] = "",
) -> "Endpoint":
    from bench.load.endpoint import Endpoint

    tls = client_tls(wanted=False, authorities=tls_ca, certificate=client_cert, private_key=client_key)
    return Endpoint.parse(base_url, tls=tls, api_key=api_key)


def _trace(
    *,
    trace: Annotated[
        TraceName, typer.Option("--trace", rich_help_panel=_TRACE, help="What is asked.")
    ] = TraceName.ORCA,
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", "-n", min=1, max=_MAX_REQUESTS, rich_help_panel=_TRACE, help="Requests.")
    ] = 64,
    input_len: Annotated[
        Any,
        typer.Option(
            "--input-len",
            parser=length_range,
            metavar="LOW-HIGH",
            show_default="the trace's",
            rich_help_panel=_TRACE,
            help="Tokens of a prompt; with shared-prefix of what follows the prefix.",
        ),
    ] = None,
    output_len: Annotated[
        Any,
        typer.Option(
            "--output-len",
            parser=length_range,
            metavar="LOW-HIGH",
            show_default="the trace's",
            rich_help_panel=_TRACE,
            help="Tokens of an output.",
        ),
    ] = None,
    prefix_len: Annotated[
        int,
        typer.Option(
            "--prefix-len", min=1, max=_MAX_LEN, rich_help_panel=_TRACE, help="Tokens of each prefix of shared-prefix."
        ),
    ] = 256,
    num_prefixes: Annotated[
        int,
        typer.Option(
            "--num-prefixes",
            min=1,
            max=_MAX_REQUESTS,
            rich_help_panel=_TRACE,
            help="Different prefixes of shared-prefix.",
        ),
    ] = 4,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            min=0,
            max=2**31,
            rich_help_panel=_TRACE,
            help="The same seed gives the same requests; each further level of load has the next seed.",
        ),
    ] = 0,
) -> TraceConfig:
    return TraceConfig.of(
        trace,
        num_requests=num_prompts,
        seed=seed,
        input_len=input_len,
        output_len=output_len,
        prefix_len=prefix_len,
        num_prefixes=num_prefixes,
    )


def _load(
    *,
    request_rate: Annotated[
        Any,
        typer.Option(
            "--request-rate",
            "--rate",
            parser=listed(request_rate),
            metavar="RATE[,RATE…]",
            rich_help_panel=_LOAD,
            help="Requests that arrive per second, whether or not the server keeps pace; inf sends each as soon as "
            "--max-concurrency has room. Several make a run each.",
        ),
    ] = "inf",
    burstiness: Annotated[
        float,
        typer.Option(
            "--burstiness",
            min=0.01,
            max=1000,
            rich_help_panel=_LOAD,
            help="1: arrivals are a Poisson process; below 1 they come in bursts, above 1 more evenly.",
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        Any,
        typer.Option(
            "--max-concurrency",
            "--concurrency",
            "-c",
            parser=listed(whole_number(1, _MAX_REQUESTS)),
            metavar="N[,N…]",
            show_default="no limit",
            rich_help_panel=_LOAD,
            help="Most requests in flight. Several make a run each.",
        ),
    ] = None,
    num_warmups: Annotated[
        int,
        typer.Option(
            "--num-warmups", min=0, max=_MAX_REQUESTS, rich_help_panel=_LOAD, help="Requests before, not counted."
        ),
    ] = 1,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", min=0.001, max=1e6, metavar="SECONDS", rich_help_panel=_LOAD, help="Longest time of a request."
        ),
    ] = 600.0,
) -> Load:
    return Load(request_rate, max_concurrency or (None,), burstiness, num_warmups, timeout)


def takes_endpoint(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of an endpoint, in place of its parameter ``endpoint``."""
    return taking(command, "endpoint", [*inspect.signature(_endpoint).parameters.values()], _endpoint)


def takes_trace(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a trace, in place of its parameter ``trace``."""
    return taking(command, "trace", [*inspect.signature(_trace).parameters.values()], _trace)


def takes_load(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of load, in place of its parameter ``load``."""
    return taking(command, "load", [*inspect.signature(_load).parameters.values()], _load)
