"""The options of an engine: written once, taken by every command that has one (``up`` and ``scheduler``).

Defaults are those of ``shared.config``.
"""

import inspect
from collections.abc import Callable
from typing import Annotated

import typer

from services.cli.option_group import taking
from services.cli.sizes import parse_size
from shared.config import EngineConfig, SchedulingConfig
from shared.topology import Topology

__all__ = ["takes_engine"]

_ENGINE = "Engine"
_SCHEDULING = "Scheduling"
_DEFAULT = EngineConfig()
_DEFAULT_SCHEDULING = _DEFAULT.scheduling

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
        metavar="auto|float32|bfloat16|float16|int8",
        rich_help_panel=_ENGINE,
        help="How numbers are held. float32, bfloat16, float16: weights, activations and K/V. int8, for CPUs: weights "
        "in 8 bits, and in 4 as well where the file has them so, and K/V in bfloat16. auto: bfloat16 on GPUs, int8 on "
        "CPUs (float32 where there is no C++ compiler, or for models that int8 does not know).",
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
MaxWaitingOption = Annotated[
    int,
    typer.Option(
        "--max-waiting",
        envvar="ORCA_MAX_WAITING",
        rich_help_panel=_SCHEDULING,
        help="Requests that may wait in the scheduler; one more is refused.",
    ),
]
MaxBatchSizeOption = Annotated[
    int,
    typer.Option(
        "--max-batch-size", envvar="ORCA_MAX_BATCH_SIZE", rich_help_panel=_SCHEDULING, help="Requests in one iteration."
    ),
]
KvPolicyOption = Annotated[
    str,
    typer.Option(
        "--kv-policy",
        envvar="ORCA_KV_POLICY",
        metavar="paged|reserve",
        rich_help_panel=_SCHEDULING,
        help="paged takes K/V blocks on demand and preempts the latest request when they run out; "
        "reserve, ORCA's own, takes all that a request can ever need at its start.",
    ),
]
ChunkedPrefillOption = Annotated[
    bool,
    typer.Option(
        "--chunked-prefill/--no-chunked-prefill",
        envvar="ORCA_CHUNKED_PREFILL",
        rich_help_panel=_SCHEDULING,
        help="Split long prompts, so that no iteration has more than --max-batch-tokens.",
    ),
]
MaxBatchTokensOption = Annotated[
    int,
    typer.Option(
        "--max-batch-tokens",
        envvar="ORCA_MAX_BATCH_TOKENS",
        rich_help_panel=_SCHEDULING,
        help="Tokens in one iteration, with chunked prefill.",
    ),
]
PrefixCacheOption = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        envvar="ORCA_PREFIX_CACHE",
        rich_help_panel=_SCHEDULING,
        help="Compute beginnings that prompts share only once.",
    ),
]
RunAheadOption = Annotated[
    int,
    typer.Option(
        "--run-ahead",
        envvar="ORCA_RUN_AHEAD",
        rich_help_panel=_SCHEDULING,
        help="With one stage: iterations sent before the tokens of the one before are back.",
    ),
]
SplitOverStagesOption = Annotated[
    bool,
    typer.Option(
        "--split-over-stages/--no-split-over-stages",
        envvar="ORCA_SPLIT_OVER_STAGES",
        rich_help_panel=_SCHEDULING,
        help="With few requests and several stages, give every stage its part of them.",
    ),
]
BatchingOption = Annotated[
    str,
    typer.Option(
        "--batching",
        envvar="ORCA_BATCHING",
        metavar="iteration|request",
        rich_help_panel=_SCHEDULING,
        help="request is a baseline to compare with: a batch stays as it is until its last request has ended. It needs "
        "--kv-policy reserve, --no-chunked-prefill and --run-ahead 0.",
    ),
]


def _engine(
    *,
    model: ModelOption = _DEFAULT.model,
    stages: StagesOption = _DEFAULT.topology.num_stages,
    tp: TpOption = _DEFAULT.topology.tp_size,
    dtype: DtypeOption = _DEFAULT.dtype,
    kv_memory: KvMemoryOption = _DEFAULT.kv_memory_bytes,
    block_size: BlockSizeOption = _DEFAULT.block_size,
    max_model_len: MaxModelLenOption = _DEFAULT.max_model_len,
    collective_timeout: CollectiveTimeoutOption = _DEFAULT.collective_timeout_s,
    max_batch_size: MaxBatchSizeOption = _DEFAULT_SCHEDULING.max_batch_size,
    max_waiting: MaxWaitingOption = _DEFAULT_SCHEDULING.max_waiting,
    kv_policy: KvPolicyOption = _DEFAULT_SCHEDULING.kv_policy,
    chunked_prefill: ChunkedPrefillOption = _DEFAULT_SCHEDULING.chunked_prefill,
    max_batch_tokens: MaxBatchTokensOption = _DEFAULT_SCHEDULING.max_batch_tokens,
    prefix_cache: PrefixCacheOption = _DEFAULT_SCHEDULING.prefix_cache,
    run_ahead: RunAheadOption = _DEFAULT_SCHEDULING.run_ahead,
    split_over_stages: SplitOverStagesOption = _DEFAULT_SCHEDULING.split_over_stages,
    batching: BatchingOption = _DEFAULT_SCHEDULING.batching,
) -> EngineConfig:
    return EngineConfig(
        model=model,
        topology=Topology(stages, tp),
        dtype=dtype,
        kv_memory_bytes=kv_memory,
        block_size=block_size,
        max_model_len=max_model_len,
        collective_timeout_s=collective_timeout,
        scheduling=SchedulingConfig(
            max_batch_size=max_batch_size,
            max_waiting=max_waiting,
            kv_policy=kv_policy,
            chunked_prefill=chunked_prefill,
            max_batch_tokens=max_batch_tokens,
            prefix_cache=prefix_cache,
            run_ahead=run_ahead,
            split_over_stages=split_over_stages,
            batching=batching,
        ),
    )


def takes_engine(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all options of an engine, in place of its first parameter ``engine``."""
    return taking(command, "engine", [*inspect.signature(_engine).parameters.values()], _engine)
