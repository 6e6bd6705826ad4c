"""Client and gateway: what is asked, what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.codec.engine import (
    engine_info_from_pb,
    engine_info_to_pb,
    engine_status_from_pb,
    engine_status_to_pb,
    sampling_from_pb,
)
from shared.errors import ProtocolError
from shared.generation import ChatMessage, Delta, Finish, GatewayStatus, GenerateOptions, ModelInfo
from shared.messages import FinishReason, TokenIds, token_ids
from shared.pb import common_pb2, gateway_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "chat_from_pb",
    "chat_to_pb",
    "delta_from_pb",
    "delta_to_pb",
    "gateway_status_from_pb",
    "gateway_status_to_pb",
    "generate_to_pb",
    "model_info_from_pb",
    "model_info_to_pb",
    "options_from_pb",
    "options_to_pb",
    "prompt_from_pb",
]


def options_to_pb(options: GenerateOptions) -> gateway_pb2.GenerationOptions:
    """Translate. Raises ``ValueError`` or ``TypeError`` where a value does not fit into its field."""
    return gateway_pb2.GenerationOptions(
        max_tokens=options.max_tokens,
        sampling=common_pb2.SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
        ),
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
    )


def options_from_pb(message: gateway_pb2.GenerationOptions) -> GenerateOptions:
    """Translate; absent fields take the contract's defaults."""
    sampling = sampling_from_pb(message.sampling)
    return GenerateOptions(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed if message.sampling.HasField("seed") else None,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def generate_to_pb(
    prompt: str | Sequence[int], options: GenerateOptions, request_id: str
) -> gateway_pb2.GenerateRequest:
    """Translate. Raises ``ValueError`` or ``TypeError`` where a value does not fit into its field."""
    request = gateway_pb2.GenerateRequest(request_id=request_id, options=options_to_pb(options))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(prompt)
    return request


def prompt_from_pb(message: gateway_pb2.GenerateRequest) -> str | TokenIds | None:
    """Return the prompt as text or as ids, None where the client gave none."""
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return token_ids(message.token_ids.ids)
        case None:
            return None


def chat_to_pb(messages: Sequence[ChatMessage], options: GenerateOptions, request_id: str) -> gateway_pb2.ChatRequest:
    """Translate. Raises ``ValueError`` or ``TypeError`` where a value does not fit into its field."""
    return gateway_pb2.ChatRequest(
        request_id=request_id,
        messages=[gateway_pb2.ChatMessage(role=message.role, content=message.content) for message in messages],
        options=options_to_pb(options),
    )


def chat_from_pb(message: gateway_pb2.ChatRequest) -> list[ChatMessage]:
    """Return the conversation."""
    return [ChatMessage(turn.role, turn.content) for turn in message.messages]


def delta_to_pb(delta: Delta) -> gateway_pb2.GenerateResponse:
    """Translate."""
    return gateway_pb2.GenerateResponse(
        request_id=delta.request_id,
        text_delta=delta.text,
        token_ids=delta.token_ids,
        finish=None if delta.finish is None else _finish_to_pb(delta.finish),
    )


def delta_from_pb(message: gateway_pb2.GenerateResponse) -> Delta:
    """Translate."""
    return Delta(
        text=message.text_delta,
        token_ids=tuple(message.token_ids),
        finish=_finish_from_pb(message.finish) if message.HasField("finish") else None,
        request_id=message.request_id,
    )


def _finish_to_pb(finish: Finish) -> gateway_pb2.Finish:
    return gateway_pb2.Finish(
        reason=common_pb2.FinishReason.ValueType(finish.reason.value),
        usage=gateway_pb2.Usage(num_prompt_tokens=finish.num_prompt_tokens, num_output_tokens=finish.num_output_tokens),
        queue_ms=finish.queue_ms,
        prefill_ms=finish.prefill_ms,
        decode_ms=finish.decode_ms,
    )


def _finish_from_pb(message: gateway_pb2.Finish) -> Finish:
    try:
        reason = FinishReason(message.reason)
    except ValueError:
        raise ProtocolError(
            f"unknown finish reason {message.reason}: client and gateway are of different versions"
        ) from None
    return Finish(
        reason=reason,
        num_prompt_tokens=message.usage.num_prompt_tokens,
        num_output_tokens=message.usage.num_output_tokens,
        queue_ms=message.queue_ms,
        prefill_ms=message.prefill_ms,
        decode_ms=message.decode_ms,
    )


def model_info_to_pb(info: ModelInfo) -> gateway_pb2.GetModelInfoResponse:
    """Translate."""
    return gateway_pb2.GetModelInfoResponse(
        engine=engine_info_to_pb(info.engine),
        eos_token_ids=info.eos_token_ids,
        has_chat_template=info.has_chat_template,
    )


def model_info_from_pb(message: gateway_pb2.GetModelInfoResponse) -> ModelInfo:
    """Translate."""
    return ModelInfo(
        engine=engine_info_from_pb(message.engine),
        eos_token_ids=tuple(message.eos_token_ids),
        has_chat_template=message.has_chat_template,
    )


def gateway_status_to_pb(status: GatewayStatus) -> gateway_pb2.GetStatusResponse:
    """Translate."""
    return gateway_pb2.GetStatusResponse(
        status=engine_status_to_pb(status.engine), num_gateway_requests=status.num_gateway_requests
    )


def gateway_status_from_pb(message: gateway_pb2.GetStatusResponse) -> GatewayStatus:
    """Translate."""
    return GatewayStatus(
        engine=engine_status_from_pb(message.status), num_gateway_requests=message.num_gateway_requests
    )
