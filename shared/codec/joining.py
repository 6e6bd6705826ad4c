"""Scheduler and workers: how a rank is claimed and an epoch is joined."""

from __future__ import annotations

from shared.errors import ProtocolError
from shared.ids import Epoch
from shared.messages import Joined, JoinRequest, Loading, Registration
from shared.pb import worker_pb2

__all__ = [
    "join_progress_from_pb",
    "join_progress_to_pb",
    "join_request_from_pb",
    "join_request_to_pb",
    "registration_from_pb",
    "registration_to_pb",
]


def registration_to_pb(registration: Registration) -> worker_pb2.RegisterRequest:
    """Translate."""
    return worker_pb2.RegisterRequest(
        stage=registration.stage,
        tp_rank=registration.tp_rank,
        address=registration.address,
        rendezvous_address=registration.rendezvous_address,
        device=registration.device,
    )


def registration_from_pb(message: worker_pb2.RegisterRequest) -> Registration:
    """Translate."""
    return Registration(
        stage=message.stage,
        tp_rank=message.tp_rank,
        address=message.address,
        rendezvous_address=message.rendezvous_address,
        device=message.device,
    )


def join_request_to_pb(request: JoinRequest) -> worker_pb2.JoinRequest:
    """Translate."""
    return worker_pb2.JoinRequest(
        epoch=request.epoch,
        stage=request.stage,
        tp_rank=request.tp_rank,
        num_stages=request.num_stages,
        tp_size=request.tp_size,
        rendezvous_address=request.rendezvous_address,
        model=request.model,
        dtype=request.dtype,
        block_size_tokens=request.block_size,
        kv_memory_bytes=request.kv_memory_bytes,
        max_model_len_tokens=request.max_model_len,
        next_stage_address=request.next_stage_address,
        tp_addresses=request.tp_addresses,
        collective_timeout_s=request.collective_timeout_s,
        workers_append_tokens=request.workers_append_tokens,
    )


def join_request_from_pb(message: worker_pb2.JoinRequest) -> JoinRequest:
    """Translate."""
    return JoinRequest(
        epoch=Epoch(message.epoch),
        stage=message.stage,
        tp_rank=message.tp_rank,
        num_stages=message.num_stages,
        tp_size=message.tp_size,
        rendezvous_address=message.rendezvous_address,
        model=message.model,
        dtype=message.dtype,
        block_size=message.block_size_tokens,
        kv_memory_bytes=message.kv_memory_bytes,
        max_model_len=message.max_model_len_tokens,
        next_stage_address=message.next_stage_address,
        tp_addresses=tuple(message.tp_addresses),
        collective_timeout_s=message.collective_timeout_s,
        workers_append_tokens=message.workers_append_tokens,
    )


def join_progress_to_pb(progress: Loading | Joined) -> worker_pb2.JoinProgress:
    """Translate."""
    match progress:
        case Loading():
            return worker_pb2.JoinProgress(
                loading=worker_pb2.Loading(phase=progress.phase, done=progress.done, total=progress.total)
            )
        case Joined():
            return worker_pb2.JoinProgress(
                joined=worker_pb2.Joined(
                    num_blocks=progress.num_blocks,
                    max_model_len_tokens=progress.max_model_len,
                    vocab_size=progress.vocab_size,
                    dtype=progress.dtype,
                    weights_bytes=progress.weights_bytes,
                    kv_bytes_per_block=progress.kv_bytes_per_block,
                )
            )


def join_progress_from_pb(message: worker_pb2.JoinProgress) -> Loading | Joined:
    """Translate."""
    kind = message.WhichOneof("kind")
    if kind == "loading":
        return Loading(phase=message.loading.phase, done=message.loading.done, total=message.loading.total)
    if kind == "joined":
        joined = message.joined
        return Joined(
            num_blocks=joined.num_blocks,
            max_model_len=joined.max_model_len_tokens,
            vocab_size=joined.vocab_size,
            dtype=joined.dtype,
            weights_bytes=joined.weights_bytes,
            kv_bytes_per_block=joined.kv_bytes_per_block,
        )
    raise ProtocolError("join progress of an unknown kind: scheduler and worker are of different versions")
