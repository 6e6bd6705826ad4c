"""The Python API: a typed asyncio client of the gateway.

::

    async with GatewayClient("127.0.0.1:50051") as client:
        async for delta in client.generate("The capital of France is", GenerateOptions(max_tokens=8)):
            print(delta.text, end="")

Failures are the typed errors of ``shared.errors``; nothing of gRPC shows.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

from grpc import aio

from shared.codec.generation import (
    chat_to_pb,
    delta_from_pb,
    gateway_status_from_pb,
    generate_to_pb,
    model_info_from_pb,
)
from shared.errors import InvalidRequestError, UnavailableError
from shared.generation import ChatMessage, Delta, Finish, GatewayStatus, GenerateOptions, ModelInfo
from shared.pb import gateway_pb2, gateway_pb2_grpc
from shared.rpc import connect, error_from_rpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
    from types import TracebackType
    from typing import Any

    _Call = aio.UnaryStreamCall[Any, gateway_pb2.GenerateResponse]

__all__ = [
    "ChatMessage",
    "Delta",
    "Finish",
    "GatewayClient",
    "GatewayStatus",
    "GenerateOptions",
    "ModelInfo",
]

_DEFAULTS = GenerateOptions()


class GatewayClient:
    """A client of the gateway at ``address`` (host:port). It connects with the first call and may be shared by tasks.

    The iterators of ``generate`` and ``chat`` cancel their request when they are closed or dropped before their end;
    to have that at a certain line, wrap them in ``contextlib.aclosing``.
    """

    def __init__(self, address: str, *, timeout_s: float = 10.0) -> None:
        """``timeout_s`` is for the short calls; ``generate`` and ``chat`` have no limit of their own."""
        self._address = address
        self._timeout_s = timeout_s
        self._channel = connect(address)
        self._stub = gateway_pb2_grpc.GatewayStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is running and close the connection."""
        await self._channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        options: GenerateOptions = _DEFAULTS,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Continue a prompt, given as text or as token ids; the last delta has ``finish``.

        Raises:
            InvalidRequestError: the request can never succeed as it is.
            OverloadedError: the gateway or the scheduler is full; try again later.
            UnavailableError: the gateway is not there, not ready or leaving.
            OrcaError: anything else, a missed ``timeout_s`` too; ``code`` is the status.
        """

        def start() -> _Call:
            return self._stub.Generate(generate_to_pb(prompt, options, request_id or ""), timeout=timeout_s)

        return self._deltas(start)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        options: GenerateOptions = _DEFAULTS,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Answer a conversation through the model's own chat template; errors as in ``generate``."""

        def start() -> _Call:
            return self._stub.Chat(chat_to_pb(messages, options, request_id or ""), timeout=timeout_s)

        return self._deltas(start)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with the tokens that the model wants around every text or without."""
        with _building():
            request = gateway_pb2.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        with self._mapped():
            response = await self._stub.Tokenize(request, timeout=self._timeout_s)
        return list(response.token_ids)

    async def model_info(self) -> ModelInfo:
        """Return the model that is served and its limits."""
        with self._mapped():
            response = await self._stub.GetModelInfo(gateway_pb2.GetModelInfoRequest(), timeout=self._timeout_s)
        return model_info_from_pb(response)

    async def status(self) -> GatewayStatus:
        """Return the state of the engine behind the gateway."""
        with self._mapped():
            response = await self._stub.GetStatus(gateway_pb2.GetStatusRequest(), timeout=self._timeout_s)
        return gateway_status_from_pb(response)

    async def _deltas(self, start: Callable[[], _Call]) -> AsyncGenerator[Delta, None]:
        with self._mapped(), _building():
            call = start()
        try:
            with self._mapped():
                async for response in call:
                    yield delta_from_pb(response)
        finally:
            call.cancel()

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except aio.AioRpcError as failure:
            raise error_from_rpc(failure, f"gateway at {self._address}") from failure
        except aio.UsageError as error:
            raise UnavailableError("this client is closed; open another one") from error


@contextlib.contextmanager
def _building() -> Iterator[None]:
    """Wrap the making of a message: what does not fit into a field can never be sent."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from error
