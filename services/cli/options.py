"""Options that several commands share, each with its help text and environment variable, once.

Defaults are not here: they are those of ``shared.config``.
"""

from typing import Annotated, Literal

import typer

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "pretty"]

_ENGINE = "Engine"
_PROCESS = "Process"

# --- worker ---------------------------------------------------------------------------------------------------------

DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        envvar="ORCA_DEVICE",
        metavar="auto|cpu|cuda",
        rich_help_panel=_ENGINE,
        help="Where the model runs; auto is CUDA where there is a GPU.",
    ),
]
ThreadsOption = Annotated[
    int,
    typer.Option(
        "--threads",
        envvar="ORCA_THREADS",
        rich_help_panel=_ENGINE,
        help="Compute threads of each worker; 0 chooses by the number of CPUs.",
    ),
]

# --- process ----------------------------------------------------------------------------------------------------------

HostOption = Annotated[
    str,
    typer.Option(
        "--host",
        envvar="ORCA_HOST",
        rich_help_panel=_PROCESS,
        help="Address to listen at; 0.0.0.0 is every interface, for which there are API keys and TLS.",
    ),
]
PortOption = Annotated[
    int,
    typer.Option(
        "--port",
        envvar="ORCA_PORT",
        min=0,
        max=65535,
        rich_help_panel=_PROCESS,
        help="gRPC port to listen at; 0 takes any free one.",
    ),
]
HttpHostOption = Annotated[
    str,
    typer.Option(
        "--http-host",
        envvar="ORCA_HTTP_HOST",
        show_default="the one of --host",
        rich_help_panel=_PROCESS,
        help="Address to serve HTTP at.",
    ),
]
HttpPortOption = Annotated[
    str,
    typer.Option(
        "--http-port",
        envvar="ORCA_HTTP_PORT",
        metavar="PORT|off",
        rich_help_panel=_PROCESS,
        help="Port of the OpenAI-compatible HTTP API; 0 takes any free one, which the log tells.",
    ),
]
MaxBodyBytesOption = Annotated[
    int,
    typer.Option(
        "--max-body-bytes",
        envvar="ORCA_MAX_BODY_BYTES",
        rich_help_panel=_PROCESS,
        help="Largest body of an HTTP request.",
    ),
]
CorsOriginOption = Annotated[
    str,
    typer.Option(
        "--cors-origin",
        envvar="ORCA_CORS_ORIGIN",
        metavar="ORIGIN,…",
        rich_help_panel=_PROCESS,
        show_default=False,
        help="Origins whose pages may call over HTTP from a browser, like https://example.org; * is every one. "
        "None by default.",
    ),
]
AllowedHostOption = Annotated[
    str,
    typer.Option(
        "--allowed-host",
        envvar="ORCA_ALLOWED_HOST",
        metavar="NAME,…",
        rich_help_panel=_PROCESS,
        show_default=False,
        help="Names other than localhost by which it may be called over HTTP where it listens on the loopback address "
        "and has no API keys.",
    ),
]
SchedulerOption = Annotated[
    str,
    typer.Option(
        "--scheduler",
        envvar="ORCA_SCHEDULER",
        metavar="HOST:PORT",
        rich_help_panel=_PROCESS,
        help="Address of the scheduler.",
    ),
]
MaxRequestsOption = Annotated[
    int,
    typer.Option(
        "--max-requests",
        envvar="ORCA_MAX_REQUESTS",
        rich_help_panel=_PROCESS,
        help="Requests that the gateway has in service at once; more wait for their turn (--max-queued). About twice "
        "--max-batch-size keeps the engine busy and shares fair.",
    ),
]
GraceOption = Annotated[
    float,
    typer.Option(
        "--grace",
        envvar="ORCA_GRACE",
        min=0,
        max=86400,
        metavar="SECONDS",
        rich_help_panel=_PROCESS,
        help="Time to let running requests end after SIGTERM or Ctrl-C; a second signal ends at once.",
    ),
]
HeartbeatOption = Annotated[
    float,
    typer.Option(
        "--heartbeat",
        envvar="ORCA_HEARTBEAT",
        metavar="SECONDS",
        rich_help_panel=_PROCESS,
        help="How often the services behind this one are asked for a sign of life; one that takes as long to answer is "
        "taken for lost.",
    ),
]
LogLevelOption = Annotated[
    LogLevel,
    typer.Option("--log-level", envvar="ORCA_LOG_LEVEL", rich_help_panel=_PROCESS, help="Least level that is logged."),
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar="ORCA_LOG_FORMAT",
        rich_help_panel=_PROCESS,
        help="How to log on standard error; auto is pretty on a terminal and JSON lines elsewhere.",
    ),
]
MetricsHostOption = Annotated[
    str,
    typer.Option(
        "--metrics-host",
        envvar="ORCA_METRICS_HOST",
        rich_help_panel=_PROCESS,
        help="Address at which /metrics is served; it is for Prometheus, not for the world.",
    ),
]
MetricsPortOption = Annotated[
    str,
    typer.Option(
        "--metrics-port",
        envvar="ORCA_METRICS_PORT",
        metavar="PORT|off",
        rich_help_panel=_PROCESS,
        help="Port at which Prometheus may scrape /metrics; 0 takes any free one, which the log tells.",
    ),
]
OtlpEndpointOption = Annotated[
    str,
    typer.Option(
        "--otlp-endpoint",
        envvar="ORCA_OTLP_ENDPOINT",
        metavar="URL",
        show_default="off",
        rich_help_panel=_PROCESS,
        help="OpenTelemetry collector that takes traces by OTLP over HTTP, for example http://127.0.0.1:4318; the "
        "standard OTEL_… variables are heeded, too. Needs the extra: pip install -e '.\\[otel]'.",
    ),
]
ExitWithParentOption = Annotated[
    bool,
    typer.Option("--exit-with-parent", hidden=True, help="Leave when standard input closes, as a supervisor's child."),
]

# --- client -----------------------------------------------------------------------------------------------------------

AddressOption = Annotated[
    str,
    typer.Option("--address", "-a", envvar="ORCA_ADDRESS", metavar="HOST:PORT", help="Address of the gateway."),
]
