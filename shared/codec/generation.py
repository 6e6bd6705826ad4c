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
from shared.errors import InvalidRequestError, ProtocolError
from shared.generation import (
    ChatMessage,
    ChatRequest,
    Delta,
    Finish,
    GatewayStatus,
    GenerateOptions,
    GenerateRequest,
    Guidance,
    GuidanceKind,
    ModelInfo,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolMode,
    TopLogprob,
    Usage,
)
from shared.messages import FinishReason, token_ids
from shared.pb import common_pb2, gateway_pb2

if TYPE_CHECKING:
    from shared.messages import TokenIds

__all__ = [
    "chat_from_pb",
    "chat_to_pb",
    "delta_from_pb",
    "delta_to_pb",
    "gateway_status_from_pb",
    "gateway_status_to_pb",
    "generate_from_pb",
    "generate_to_pb",
    "model_info_from_pb",
    "model_info_to_pb",
    "options_from_pb",
    "options_to_pb",
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
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias=options.logit_bias,
            min_tokens=options.min_tokens,
            num_logprobs=options.num_logprobs,
        ),
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        stop=options.stop,
        n=options.n,
        best_of=options.best_of,
        guidance=None if options.guidance is None else _guidance_to_pb(options.guidance),
        timeout_s=options.timeout_s,
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
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=sampling.min_tokens,
        n=message.n if message.HasField("n") else 1,
        best_of=message.best_of if message.HasField("best_of") else None,
        num_logprobs=sampling.num_logprobs,
        guidance=_guidance_from_pb(message.guidance),
        timeout_s=message.timeout_s if message.HasField("timeout_s") else None,
    )


def _guidance_to_pb(guidance: Guidance) -> gateway_pb2.Guidance:
    match guidance.kind:
        case GuidanceKind.JSON_OBJECT:
            return gateway_pb2.Guidance(json_object=True)
        case GuidanceKind.JSON_SCHEMA:
            return gateway_pb2.Guidance(json_schema=guidance.text)
        case GuidanceKind.REGEX:
            return gateway_pb2.Guidance(regex=guidance.text)
        case GuidanceKind.GRAMMAR:
            return gateway_pb2.Guidance(grammar=guidance.text)
        case GuidanceKind.CHOICES:
            return gateway_pb2.Guidance(choices=gateway_pb2.Choices(texts=guidance.choices))


def _guidance_from_pb(message: gateway_pb2.Guidance) -> Guidance | None:
    match message.WhichOneof("kind"):
        case None:
            return None
        case "json_object":
            return Guidance(GuidanceKind.JSON_OBJECT) if message.json_object else None
        case "choices":
            return Guidance(GuidanceKind.CHOICES, choices=tuple(message.choices.texts))
        case kind:
            return Guidance(GuidanceKind(kind), getattr(message, kind))


def generate_to_pb(request: GenerateRequest) -> gateway_pb2.GenerateRequest:
    """Translate. Raises ``ValueError`` or ``TypeError`` where a value does not fit into its field."""
    return gateway_pb2.GenerateRequest(
        request_id=request.request_id,
        prompts=[
            gateway_pb2.Prompt(text=prompt)
            if isinstance(prompt, str)
            else gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=prompt))
            for prompt in request.prompts
        ],
        options=options_to_pb(request.options),
        echo=request.echo,
        return_prompt_token_ids=request.return_prompt_token_ids,
    )


def generate_from_pb(message: gateway_pb2.GenerateRequest) -> GenerateRequest:
    """Translate. Raises ``InvalidRequestError`` for a prompt that is neither text nor ids."""
    prompts: list[str | TokenIds] = []
    for index, prompt in enumerate(message.prompts):
        match prompt.WhichOneof("kind"):
            case "text":
                prompts.append(prompt.text)
            case "token_ids":
                prompts.append(token_ids(prompt.token_ids.ids))
            case None:
                raise InvalidRequestError(f"prompts[{index}] is empty; set text or token_ids")
    return GenerateRequest(
        prompts=prompts,
        options=options_from_pb(message.options),
        echo=message.echo,
        request_id=message.request_id,
        return_prompt_token_ids=message.return_prompt_token_ids,
    )


def chat_to_pb(request: ChatRequest) -> gateway_pb2.ChatRequest:
    """Translate. Raises ``ValueError`` or ``TypeError`` where a value does not fit into its field."""
    return gateway_pb2.ChatRequest(
        request_id=request.request_id,
        messages=[
            gateway_pb2.ChatMessage(
                role=message.role,
                content=message.content,
                tool_calls=[
                    gateway_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
                    for call in message.tool_calls
                ],
                tool_call_id=message.tool_call_id,
                name=message.name,
            )
            for message in request.messages
        ],
        options=options_to_pb(request.options),
        tools=[
            gateway_pb2.Tool(name=tool.name, description=tool.description, parameters=tool.parameters)
            for tool in request.tools
        ],
        tool_choice=_tool_choice_to_pb(request.tool_choice),
        continue_final_message=request.continue_final_message,
        parallel_tool_calls=request.parallel_tool_calls,
        return_prompt_token_ids=request.return_prompt_token_ids,
    )


def _tool_choice_to_pb(choice: ToolChoice) -> gateway_pb2.ToolChoice:
    match choice.mode:
        case ToolMode.AUTO:
            return gateway_pb2.ToolChoice(auto=True)
        case ToolMode.NONE:
            return gateway_pb2.ToolChoice(none=True)
        case ToolMode.REQUIRED:
            return gateway_pb2.ToolChoice(required=True)
        case ToolMode.NAMED:
            return gateway_pb2.ToolChoice(name=choice.name)


def chat_from_pb(message: gateway_pb2.ChatRequest) -> ChatRequest:
    """Translate."""
    mode = message.tool_choice.WhichOneof("kind")
    return ChatRequest(
        messages=[
            ChatMessage(
                role=turn.role,
                content=turn.content,
                tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in turn.tool_calls),
                tool_call_id=turn.tool_call_id,
                name=turn.name,
            )
            for turn in message.messages
        ],
        options=options_from_pb(message.options),
        tools=[Tool(tool.name, tool.description, tool.parameters) for tool in message.tools],
        tool_choice=ToolChoice() if mode is None else ToolChoice(ToolMode(mode), message.tool_choice.name),
        continue_final_message=message.continue_final_message,
        request_id=message.request_id,
        parallel_tool_calls=message.parallel_tool_calls if message.HasField("parallel_tool_calls") else True,
        return_prompt_token_ids=message.return_prompt_token_ids,
    )


def delta_to_pb(delta: Delta) -> gateway_pb2.GenerateResponse:
    """Translate."""
    return gateway_pb2.GenerateResponse(
        request_id=delta.request_id,
        choice=delta.choice,
        text_delta=delta.text,
        token_ids=delta.token_ids,
        logprobs=[_token_logprob_to_pb(token) for token in delta.logprobs] if delta.logprobs else None,
        is_prompt=delta.is_prompt,
        tool_calls=[
            gateway_pb2.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments_delta=call.arguments)
            for call in delta.tool_calls
        ]
        if delta.tool_calls
        else None,
        finish=None if delta.finish is None else _finish_to_pb(delta.finish),
        usage=None if delta.usage is None else _usage_to_pb(delta.usage),
        prompt_token_ids=[gateway_pb2.TokenIds(ids=ids) for ids in delta.prompt_token_ids]
        if delta.prompt_token_ids
        else None,
    )


def delta_from_pb(message: gateway_pb2.GenerateResponse) -> Delta:
    """Translate."""
    return Delta(
        text=message.text_delta,
        token_ids=tuple(message.token_ids),
        finish=_finish_from_pb(message.finish) if message.HasField("finish") else None,
        request_id=message.request_id,
        choice=message.choice,
        logprobs=tuple(map(_token_logprob_from_pb, message.logprobs)),
        is_prompt=message.is_prompt,
        tool_calls=tuple(
            ToolCallDelta(call.index, call.id, call.name, call.arguments_delta) for call in message.tool_calls
        ),
        usage=_usage_from_pb(message.usage) if message.HasField("usage") else None,
        prompt_token_ids=tuple(tuple(prompt.ids) for prompt in message.prompt_token_ids),
    )


def _token_logprob_to_pb(token: TokenLogprob) -> gateway_pb2.TokenLogprob:
    return gateway_pb2.TokenLogprob(
        token_id=token.token_id,
        token=token.token,
        token_bytes=token.token_bytes,
        logprob=token.logprob,
        top=[
            gateway_pb2.TopLogprob(
                token_id=other.token_id, token=other.token, token_bytes=other.token_bytes, logprob=other.logprob
            )
            for other in token.top
        ],
    )


def _token_logprob_from_pb(message: gateway_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        token_id=message.token_id,
        token=message.token,
        token_bytes=message.token_bytes,
        logprob=message.logprob if message.HasField("logprob") else None,
        top=tuple(TopLogprob(top.token_id, top.token, top.token_bytes, top.logprob) for top in message.top),
    )


def _usage_to_pb(usage: Usage) -> gateway_pb2.Usage:
    return gateway_pb2.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_output_tokens=usage.num_output_tokens,
        num_cached_tokens=usage.num_cached_tokens,
    )


def _usage_from_pb(message: gateway_pb2.Usage) -> Usage:
    return Usage(message.num_prompt_tokens, message.num_output_tokens, message.num_cached_tokens)


def _finish_to_pb(finish: Finish) -> gateway_pb2.Finish:
    return gateway_pb2.Finish(
        reason=common_pb2.FinishReason.ValueType(finish.reason.value),
        stop=finish.stop if isinstance(finish.stop, str) else None,
        stop_token_id=finish.stop if isinstance(finish.stop, int) else None,
        num_output_tokens=finish.num_output_tokens,
        queue_ms=finish.queue_ms,
        prefill_ms=finish.prefill_ms,
        decode_ms=finish.decode_ms,
        num_cached_tokens=finish.num_cached_tokens,
        num_preemptions=finish.num_preemptions,
    )


def _finish_from_pb(message: gateway_pb2.Finish) -> Finish:
    try:
        reason = FinishReason(message.reason)
    except ValueError:
        raise ProtocolError(
            f"unknown finish reason {message.reason}: client and gateway are of different versions"
        ) from None
    stop: str | int | None = message.stop if message.HasField("stop") else None
    return Finish(
        reason=reason,
        num_output_tokens=message.num_output_tokens,
        queue_ms=message.queue_ms,
        prefill_ms=message.prefill_ms,
        decode_ms=message.decode_ms,
        num_cached_tokens=message.num_cached_tokens,
        num_preemptions=message.num_preemptions,
        stop=message.stop_token_id if message.HasField("stop_token_id") else stop,
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
