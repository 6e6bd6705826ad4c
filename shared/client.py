"""The Python API: a typed asyncio client of the gateway.

::

    async with GatewayClient("127.0.0.1:50051") as client:
        async for delta in client.generate("The capital of France is", GenerateOptions(max_tokens=8)):
            print(delta.text, end="")

Failures are the typed errors of ``shared.errors``; nothing of gRPC shows. Without asyncio: ``shared.sync_client``.
Whole answers instead of deltas: ``shared.completion``.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

from grpc import aio

from shared.authentication import authorization_metadata
from shared.codec.calls import chat_call, detokenize_call, generate_call, tokenize_call
from shared.codec.generation import delta_from_pb, gateway_status_from_pb, model_info_from_pb
from shared.codec.mesh_view import mesh_snapshot_from_pb
from shared.errors import UnavailableError
from shared.generation import (
    ChatMessage,
    ChatRequest,
    Delta,
    Finish,
    GatewayStatus,
    GenerateOptions,
    GenerateRequest,
    ModelInfo,
)
from shared.mesh_view import DEFAULT_INTERVAL_S, check_interval
from shared.pb import gateway_pb2, gateway_pb2_grpc
from shared.rpc import connect, error_from_rpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
    from types import TracebackType
    from typing import Any

    from shared.mesh_view import MeshSnapshot
    from shared.tls import TlsCredentials

    _Call = aio.UnaryStreamCall[Any, gateway_pb2.GenerateResponse]

__all__ = [
    "ChatMessage",
    "ChatRequest",
    "Delta",
    "Finish",
    "GatewayClient",
    "GatewayStatus",
    "GenerateOptions",
    "GenerateRequest",
    "ModelInfo",
]


class GatewayClient:
    """A client of the gateway at ``address`` (host:port). It connects with the first call and may be shared by tasks.

    The iterators of ``generate`` and ``chat`` cancel their request when they are closed or dropped before their end;
    to have that at a certain line, wrap them in ``contextlib.aclosing``.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: TlsCredentials | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """``api_key`` goes along with each call; ``tls`` is what ``shared.tls.TlsFiles(…).load()`` returns.

        ``timeout_s`` is for the short calls; ``generate`` and ``chat`` have no limit of their own.
        """
        self._address = address
        self._metadata = authorization_metadata(api_key)
        self._timeout_s = timeout_s
        self._channel = connect(address, tls)
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
        prompt: str | Sequence[int] | GenerateRequest,
        options: GenerateOptions | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Continue a prompt, given as text, as token ids, or with all that goes with it; the last delta has ``usage``.

        ``options`` and ``request_id`` take the place of the request's own.

        Raises:
            InvalidRequestError: the request can never succeed as it is.
            OverloadedError: the gateway or the scheduler is full; try again later.
            UnavailableError: the gateway is not there, not ready or leaving.
            OrcaError: anything else, a missed ``timeout_s`` too; ``code`` is the status.
        """
        return self._deltas(
            lambda: self._stub.Generate(
                generate_call(prompt, options, request_id), timeout=timeout_s, metadata=self._metadata
            )
        )

    def chat(
        self,
        messages: Sequence[ChatMessage] | ChatRequest,
        options: GenerateOptions | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Answer a conversation through the model's own chat template; errors as in ``generate``."""
        return self._deltas(
            lambda: self._stub.Chat(
                chat_call(messages, options, request_id), timeout=timeout_s, metadata=self._metadata
            )
        )

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with the tokens that the model wants around every text or without."""
        request = tokenize_call(text, add_special_tokens=add_special_tokens)
        with self._mapped():
            response = await self._stub.Tokenize(request, timeout=self._timeout_s, metadata=self._metadata)
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        request = detokenize_call(token_ids)
        with self._mapped():
            response = await self._stub.Detokenize(request, timeout=self._timeout_s, metadata=self._metadata)
        return response.text

    async def model_info(self) -> ModelInfo:
        """Return the model that is served and its limits."""
        with self._mapped():
            response = await self._stub.GetModelInfo(
                gateway_pb2.GetModelInfoRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        return model_info_from_pb(response)

    async def status(self) -> GatewayStatus:
        """Return the state of the engine behind the gateway."""
        with self._mapped():
            response = await self._stub.GetStatus(
                gateway_pb2.GetStatusRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        return gateway_status_from_pb(response)

    async def watch(self, interval_s: float = DEFAULT_INTERVAL_S) -> AsyncGenerator[MeshSnapshot, None]:
        """Give a snapshot of the mesh at once and then every ``interval_s`` seconds, until the gateway leaves.

        Raises:
            InvalidRequestError: the interval is out of range.
            OverloadedError: too many watch already.
            UnavailableError: the gateway is not there, or not any more.
        """
        check_interval(interval_s)
        with self._mapped():
            request = gateway_pb2.WatchMeshRequest(interval_ms=round(interval_s * 1e3))
            call = self._stub.WatchMesh(request, metadata=self._metadata)
        try:
            with self._mapped():
                async for message in call:
                    yield mesh_snapshot_from_pb(message)
        finally:
            call.cancel()

    async def _deltas(self, start: Callable[[], _Call]) -> AsyncGenerator[Delta, None]:
        with self._mapped():
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
