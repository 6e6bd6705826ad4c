"""Gateway and scheduler: requests up, events down."""

from __future__ import annotations

from shared.codec.columns import check_columns
from shared.codec.engine import engine_info_from_pb, engine_info_to_pb, sampling_from_pb, sampling_to_pb
from shared.codec.logprobs import indexed_from_pb, logprobs_to_pb, prompt_logprobs_from_pb
from shared.errors import ProtocolError
from shared.ids import Handle, RequestId
from shared.messages import Cancel, Ended, FinishReason, Hello, SessionEvents, Submit, token_ids
from shared.pb import common_pb2, scheduler_pb2
from shared.status import StatusCode

__all__ = [
    "session_events_from_pb",
    "session_events_to_pb",
    "session_request_from_pb",
    "session_request_to_pb",
]


def session_request_to_pb(message: Hello | Submit | Cancel) -> scheduler_pb2.SessionRequest:
    """Translate."""
    match message:
        case Hello():
            return scheduler_pb2.SessionRequest(hello=scheduler_pb2.Hello(gateway_id=message.gateway_id))
        case Cancel():
            return scheduler_pb2.SessionRequest(cancel=scheduler_pb2.Cancel(handle=message.handle))
        case Submit():
            return scheduler_pb2.SessionRequest(
                submit=scheduler_pb2.Submit(
                    handle=message.handle,
                    request_id=message.request_id,
                    prompt_token_ids=message.prompt_token_ids,
                    output_token_ids=message.output_token_ids,
                    max_tokens=message.max_tokens,
                    sampling=sampling_to_pb(message.sampling),
                    stop_token_ids=sorted(message.stop_token_ids),
                    num_prompt_logprobs=message.num_prompt_logprobs,
                    grammar=message.grammar,
                    traceparent=message.traceparent,
                )
            )


def session_request_from_pb(message: scheduler_pb2.SessionRequest) -> Hello | Submit | Cancel:
    """Translate."""
    kind = message.WhichOneof("kind")
    if kind == "hello":
        return Hello(gateway_id=message.hello.gateway_id)
    if kind == "cancel":
        return Cancel(handle=Handle(message.cancel.handle))
    if kind == "submit":
        submit = message.submit
        return Submit(
            handle=Handle(submit.handle),
            request_id=RequestId(submit.request_id),
            prompt_token_ids=token_ids(submit.prompt_token_ids),
            output_token_ids=token_ids(submit.output_token_ids),
            max_tokens=submit.max_tokens,
            sampling=sampling_from_pb(submit.sampling),
            stop_token_ids=frozenset(submit.stop_token_ids),
            num_prompt_logprobs=submit.num_prompt_logprobs if submit.HasField("num_prompt_logprobs") else None,
            grammar=submit.grammar,
            traceparent=submit.traceparent,
        )
    raise ProtocolError("session request of an unknown kind: gateway and scheduler are of different versions")


def session_events_to_pb(events: SessionEvents) -> scheduler_pb2.SessionEvents:
    """Translate."""
    return scheduler_pb2.SessionEvents(
        token_handles=events.token_handles,
        token_ids=events.token_ids,
        ended=[
            scheduler_pb2.Ended(
                handle=ended.handle,
                reason=common_pb2.FinishReason.ValueType(ended.reason.value),
                error_code=ended.error_code,
                error_message=ended.error_message,
                queue_ns=ended.queue_ns,
                prefill_ns=ended.prefill_ns,
                decode_ns=ended.decode_ns,
                num_cached_tokens=ended.num_cached_tokens,
                num_preemptions=ended.num_preemptions,
            )
            for ended in events.ended
        ],
        engine_ready=None if events.engine_ready is None else engine_info_to_pb(events.engine_ready),
        engine_lost=events.engine_lost,
        logprob_indices=events.token_logprobs.keys(),
        logprobs=logprobs_to_pb(events.token_logprobs.values()),
        prompt_logprobs=[
            scheduler_pb2.PromptLogprobs(
                handle=handle, first_position=piece.first_position, logprobs=logprobs_to_pb(piece.tokens)
            )
            for handle, piece in events.prompt_logprobs
        ],
    )


def session_events_from_pb(message: scheduler_pb2.SessionEvents) -> SessionEvents:
    """Translate."""
    check_columns("SessionEvents", ("token_handles", len(message.token_handles)), ("token_ids", len(message.token_ids)))
    return SessionEvents(
        token_handles=[Handle(handle) for handle in message.token_handles],
        token_ids=list(message.token_ids),
        ended=[
            Ended(
                handle=Handle(ended.handle),
                reason=_finish_reason(ended.reason),
                error_code=_status_code(ended.error_code),
                error_message=ended.error_message,
                queue_ns=ended.queue_ns,
                prefill_ns=ended.prefill_ns,
                decode_ns=ended.decode_ns,
                num_cached_tokens=ended.num_cached_tokens,
                num_preemptions=ended.num_preemptions,
            )
            for ended in message.ended
        ],
        engine_ready=engine_info_from_pb(message.engine_ready) if message.HasField("engine_ready") else None,
        engine_lost=message.engine_lost,
        token_logprobs=indexed_from_pb(message.logprob_indices, message.logprobs),
        prompt_logprobs=[
            (Handle(piece.handle), prompt_logprobs_from_pb(piece.first_position, piece.logprobs))
            for piece in message.prompt_logprobs
        ],
    )


def _finish_reason(value: int) -> FinishReason:
    try:
        return FinishReason(value)
    except ValueError:
        raise ProtocolError(f"unknown finish reason {value}: gateway and scheduler are of different versions") from None


def _status_code(value: int) -> StatusCode:
    try:
        return StatusCode(value)
    except ValueError:
        return StatusCode.UNKNOWN
