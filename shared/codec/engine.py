"""Sampling parameters, engine info and status: types of more than one seam."""

from __future__ import annotations

from shared.messages import EngineInfo, EngineStatus, SamplingParams, WorkerStatus
from shared.pb import common_pb2

__all__ = [
    "engine_info_from_pb",
    "engine_info_to_pb",
    "engine_status_from_pb",
    "engine_status_to_pb",
    "sampling_from_pb",
    "sampling_to_pb",
]


def sampling_to_pb(params: SamplingParams) -> common_pb2.SamplingParams:
    """Translate."""
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        min_tokens=params.min_tokens,
        num_logprobs=params.num_logprobs,
    )


def sampling_from_pb(message: common_pb2.SamplingParams) -> SamplingParams:
    """Translate; absent fields take the contract's defaults."""
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        seed=message.seed,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        min_tokens=message.min_tokens,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
    )


def engine_info_to_pb(info: EngineInfo) -> common_pb2.EngineInfo:
    """Translate."""
    return common_pb2.EngineInfo(
        model=info.model,
        max_model_len_tokens=info.max_model_len,
        vocab_size=info.vocab_size,
        num_slots_tokens=info.num_slots,
        block_size_tokens=info.block_size,
        num_stages=info.num_stages,
        tp_size=info.tp_size,
        dtype=info.dtype,
    )


def engine_info_from_pb(message: common_pb2.EngineInfo) -> EngineInfo:
    """Translate."""
    return EngineInfo(
        model=message.model,
        max_model_len=message.max_model_len_tokens,
        vocab_size=message.vocab_size,
        num_slots=message.num_slots_tokens,
        block_size=message.block_size_tokens,
        num_stages=message.num_stages,
        tp_size=message.tp_size,
        dtype=message.dtype,
    )


def engine_status_to_pb(status: EngineStatus) -> common_pb2.EngineStatus:
    """Translate."""
    return common_pb2.EngineStatus(
        ready=status.ready,
        reason=status.reason,
        epoch=status.epoch,
        info=None if status.info is None else engine_info_to_pb(status.info),
        workers=[
            common_pb2.WorkerStatus(
                stage=worker.stage,
                tp_rank=worker.tp_rank,
                address=worker.address,
                state=worker.state,
                detail=worker.detail,
            )
            for worker in status.workers
        ],
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        num_in_flight_steps=status.num_in_flight_steps,
        num_used_slots_tokens=status.num_used_slots,
        num_cached_slots_tokens=status.num_cached_slots,
        num_preempted=status.num_preempted,
        num_preemptions=status.num_preemptions,
        num_prompt_tokens=status.num_prompt_tokens,
        num_cached_prompt_tokens=status.num_cached_prompt_tokens,
        num_broken_invariants=status.num_broken_invariants,
        num_steps=status.num_steps,
        num_output_tokens=status.num_output_tokens,
        num_finished=status.num_finished,
        last_batch_size=status.last_batch_size,
        last_batch_tokens=status.last_batch_tokens,
    )


def engine_status_from_pb(message: common_pb2.EngineStatus) -> EngineStatus:
    """Translate."""
    return EngineStatus(
        ready=message.ready,
        reason=message.reason,
        epoch=message.epoch,
        info=engine_info_from_pb(message.info) if message.HasField("info") else None,
        workers=tuple(
            WorkerStatus(
                stage=worker.stage,
                tp_rank=worker.tp_rank,
                address=worker.address,
                state=worker.state,
                detail=worker.detail,
            )
            for worker in message.workers
        ),
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_in_flight_steps=message.num_in_flight_steps,
        num_used_slots=message.num_used_slots_tokens,
        num_cached_slots=message.num_cached_slots_tokens,
        num_preempted=message.num_preempted,
        num_preemptions=message.num_preemptions,
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_prompt_tokens=message.num_cached_prompt_tokens,
        num_broken_invariants=message.num_broken_invariants,
        num_steps=message.num_steps,
        num_output_tokens=message.num_output_tokens,
        num_finished=message.num_finished,
        last_batch_size=message.last_batch_size,
        last_batch_tokens=message.last_batch_tokens,
    )
