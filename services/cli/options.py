"""Options that several commands share, each with its help text and environment variable, once.

Defaults are not here: they are those of ``shared.config``.
"""

from typing import Annotated, Literal

import typer

from services.cli.sizes import parse_size

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "pretty"]

_ENGINE = "Engine"
_PROCESS = "Process"
_SAMPLING = "Sampling"

# --- engine -----------------------------------------------------------------------------------------------------------

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        envvar="ORCA_MODEL",
        rich_help_panel=_ENGINE,
        help="Model to serve: a name of `orca models list`, a folder in Hugging Face layout, a .gguf file, "
        "hf:owner/name, random:<shape>, or synthetic:<key>=<value>,… for tests.",
    ),
]
StagesOption = Annotated[
    int,
    typer.Option("--stages", envvar="ORCA_STAGES", rich_help_panel=_ENGINE, help="Pipeline stages; layers are split."),
]
TpOption = Annotated[
    int,
    typer.Option(
        "--tp", envvar="ORCA_TP", rich_help_panel=_ENGINE, help="Tensor-parallel ranks in each stage; heads are split."
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        envvar="ORCA_DTYPE",
        metavar="auto|float32|bfloat16|float16",
        rich_help_panel=_ENGINE,
        help="Element type of weights and K/V; auto is float32 on CPUs, bfloat16 on GPUs.",
    ),
]
MaxBatchSizeOption = Annotated[
    int,
    typer.Option(
        "--max-batch-size", envvar="ORCA_MAX_BATCH_SIZE", rich_help_panel=_ENGINE, help="Requests in one iteration."
    ),
]
KvMemoryOption = Annotated[
    int,
    typer.Option(
        "--kv-memory",
        envvar="ORCA_KV_MEMORY",
        parser=parse_size,
        metavar="SIZE",
        show_default="1GiB",
        rich_help_panel=_ENGINE,
        help="Memory for K/V on each worker, for example 512MiB.",
    ),
]
BlockSizeOption = Annotated[
    int,
    typer.Option("--block-size", envvar="ORCA_BLOCK_SIZE", rich_help_panel=_ENGINE, help="Tokens in one K/V block."),
]
MaxModelLenOption = Annotated[
    int,
    typer.Option(
        "--max-model-len",
        envvar="ORCA_MAX_MODEL_LEN",
        rich_help_panel=_ENGINE,
        help="Longest sequence, prompt and output, in tokens; 0 takes the model's own limit.",
    ),
]
MaxWaitingOption = Annotated[
    int,
    typer.Option(
        "--max-waiting",
        envvar="ORCA_MAX_WAITING",
        rich_help_panel=_ENGINE,
        help="Requests that may wait in the scheduler; one more is refused.",
    ),
]
CollectiveTimeoutOption = Annotated[
    int,
    typer.Option(
        "--collective-timeout",
        envvar="ORCA_COLLECTIVE_TIMEOUT",
        metavar="SECONDS",
        rich_help_panel=_ENGINE,
        help="An exchange between workers that takes longer is taken for lost.",
    ),
]
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
        help="Address to listen at; 0.0.0.0 is every interface. There is no authentication: keep it private.",
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
        help="Requests that the gateway serves at once; one more is refused.",
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
ExitWithParentOption = Annotated[
    bool,
    typer.Option("--exit-with-parent", hidden=True, help="Leave when standard input closes, as a supervisor's child."),
]

# --- client -----------------------------------------------------------------------------------------------------------

AddressOption = Annotated[
    str,
    typer.Option("--address", "-a", envvar="ORCA_ADDRESS", metavar="HOST:PORT", help="Address of a gateway."),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        rich_help_panel=_SAMPLING,
        show_default=False,
        help="Output tokens at most; without it, 16 for generate and what the context leaves for chat.",
    ),
]
TemperatureOption = Annotated[
    float,
    typer.Option(
        "--temperature",
        "-t",
        rich_help_panel=_SAMPLING,
        help="0 always takes the likeliest token; higher is more random.",
    ),
]
TopKOption = Annotated[
    int, typer.Option("--top-k", rich_help_panel=_SAMPLING, help="Keep the k likeliest tokens; 0 keeps all.")
]
TopPOption = Annotated[
    float,
    typer.Option(
        "--top-p", rich_help_panel=_SAMPLING, help="Keep the smallest set of tokens with this much probability."
    ),
]
MinPOption = Annotated[
    float,
    typer.Option(
        "--min-p",
        rich_help_panel=_SAMPLING,
        help="Keep tokens at least this times as likely as the likeliest one.",
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed", rich_help_panel=_SAMPLING, show_default=False, help="The same seed gives the same tokens, always."
    ),
]
IgnoreEosOption = Annotated[
    bool,
    typer.Option("--ignore-eos", rich_help_panel=_SAMPLING, help="Go on past the model's own end of text."),
]
StopTokenIdOption = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-token-id",
        rich_help_panel=_SAMPLING,
        show_default=False,
        help="Id of a token that ends the output; may be given several times.",
    ),
]
