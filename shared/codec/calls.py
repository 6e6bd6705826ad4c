"""The messages of the gateway's calls, made from what Python programs give to a client.

What does not fit into a field can never be sent: that is refused here, and never ends in an error of protobuf.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, TypeVar

from shared.codec.generation import chat_to_pb, generate_to_pb
from shared.errors import InvalidRequestError
from shared.generation import ChatRequest, GenerateRequest
from shared.pb import gateway_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shared.generation import ChatMessage, GenerateOptions

__all__ = ["chat_call", "detokenize_call", "generate_call", "tokenize_call"]

_Request = TypeVar("_Request", GenerateRequest, ChatRequest)


def generate_call(
    prompt: str | Sequence[int] | GenerateRequest, options: GenerateOptions | None, request_id: str | None
) -> gateway_pb2.GenerateRequest:
    """Return the message; ``options`` and ``request_id`` take the place of the request's own. May raise, as all here.

    Raises:
        InvalidRequestError: a value does not fit into its field.
    """
    request = prompt if isinstance(prompt, GenerateRequest) else GenerateRequest((prompt,))
    with _building():
        return generate_to_pb(_adapted(request, options, request_id))


def chat_call(
    messages: Sequence[ChatMessage] | ChatRequest, options: GenerateOptions | None, request_id: str | None
) -> gateway_pb2.ChatRequest:
    """Return the message; ``options`` and ``request_id`` take the place of the request's own."""
    request = messages if isinstance(messages, ChatRequest) else ChatRequest(messages)
    with _building():
        return chat_to_pb(_adapted(request, options, request_id))


def tokenize_call(text: str, *, add_special_tokens: bool) -> gateway_pb2.TokenizeRequest:
    """Return the message."""
    with _building():
        return gateway_pb2.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)


def detokenize_call(token_ids: Sequence[int]) -> gateway_pb2.DetokenizeRequest:
    """Return the message."""
    with _building():
        return gateway_pb2.DetokenizeRequest(token_ids=token_ids)


def _adapted(request: _Request, options: GenerateOptions | None, request_id: str | None) -> _Request:
    return dataclasses.replace(
        request,
        options=request.options if options is None else options,
        request_id=request.request_id if request_id is None else request_id,
    )


@contextlib.contextmanager
def _building() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from error
