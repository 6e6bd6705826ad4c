"""The Python API without asyncio: the client of the gateway for scripts, notebooks and threads.

::

    with SyncGatewayClient("127.0.0.1:50051") as client:
        for delta in client.generate("The capital of France is", GenerateOptions(max_tokens=8)):
            print(delta.text, end="")

It has the methods of ``shared.client.GatewayClient`` and the same errors; only waiting is different.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import grpc

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
from shared.rpc import connect_blocking, error_from_rpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from shared.mesh_view import MeshSnapshot
    from shared.tls import TlsCredentials

    _Call = grpc._CallIterator[Any]  # noqa: SLF001 - a name of the type stubs only

__all__ = [
    "ChatMessage",
    "ChatRequest",
    "Delta",
    "Finish",
    "GatewayStatus",
    "GenerateOptions",
    "GenerateRequest",
    "ModelInfo",
    "Stream",
    "SyncGatewayClient",
]


_News = TypeVar("_News")


class Stream(Generic[_News]):
    """What a call that is running tells; iterate over it once, in one thread.

    Closing it, leaving its ``with`` block or dropping it before its end cancels the call, and the request with it. Any
    thread may close it: one that waits for news then gets an ``OrcaError`` with the code CANCELLED.
    """

    def __init__(self, call: _Call, decode: Callable[[Any], _News], peer: str) -> None:
        self._call = call
        self._decode = decode
        self._peer = peer
        self._is_closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _News:
        """Wait for news. Errors: those of the client's method."""
        if self._is_closed:
            raise StopIteration
        try:
            return self._decode(next(self._call))
        except grpc.RpcError as failure:
            raise error_from_rpc(failure, self._peer) from failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the call where it is still running; there is no more news."""
        self._is_closed = True
        self._call.cancel()


class SyncGatewayClient:
    """A client of the gateway at ``address`` (host:port). It connects with the first call; threads may share it."""

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
        self._peer = f"gateway at {address}"
        self._timeout_s = timeout_s
        self._metadata = authorization_metadata(api_key)
        self._channel = connect_blocking(address, tls)
        self._stub = gateway_pb2_grpc.GatewayStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is running and close the connection."""
        self._channel.close()

    def generate(
        self,
        prompt: str | Sequence[int] | GenerateRequest,
        options: GenerateOptions | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Stream[Delta]:
        """Continue a prompt, given as text, as token ids, or with all that goes with it; the last delta has ``usage``.

        ``options`` and ``request_id`` take the place of the request's own. The request starts at once.

        Raises:
            InvalidRequestError: the request can never succeed as it is.
            OverloadedError: the gateway or the scheduler is full; try again later.
            UnavailableError: the gateway is not there, not ready or leaving.
            OrcaError: anything else, a missed ``timeout_s`` too; ``code`` is the status.
        """
        request = generate_call(prompt, options, request_id)
        with _mapped(self._peer):
            call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        return Stream(call, delta_from_pb, self._peer)

    def chat(
        self,
        messages: Sequence[ChatMessage] | ChatRequest,
        options: GenerateOptions | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Stream[Delta]:
        """Answer a conversation through the model's own chat template; errors as in ``generate``."""
        request = chat_call(messages, options, request_id)
        with _mapped(self._peer):
            call = self._stub.Chat(request, timeout=timeout_s, metadata=self._metadata)
        return Stream(call, delta_from_pb, self._peer)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with the tokens that the model wants around every text or without."""
        request = tokenize_call(text, add_special_tokens=add_special_tokens)
        with _mapped(self._peer):
            return list(self._stub.Tokenize(request, timeout=self._timeout_s, metadata=self._metadata).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        request = detokenize_call(token_ids)
        with _mapped(self._peer):
            return self._stub.Detokenize(request, timeout=self._timeout_s, metadata=self._metadata).text

    def model_info(self) -> ModelInfo:
        """Return the model that is served and its limits."""
        with _mapped(self._peer):
            response = self._stub.GetModelInfo(
                gateway_pb2.GetModelInfoRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        return model_info_from_pb(response)

    def status(self) -> GatewayStatus:
        """Return the state of the engine behind the gateway."""
        with _mapped(self._peer):
            response = self._stub.GetStatus(
                gateway_pb2.GetStatusRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        return gateway_status_from_pb(response)

    def watch(self, interval_s: float = DEFAULT_INTERVAL_S) -> Stream[MeshSnapshot]:
        """Give a snapshot of the mesh at once and then every ``interval_s`` seconds, until the gateway leaves.

        Raises:
            InvalidRequestError: the interval is out of range.
            OverloadedError: too many watch already.
            UnavailableError: the gateway is not there, or not any more.
        """
        check_interval(interval_s)
        request = gateway_pb2.WatchMeshRequest(interval_ms=round(interval_s * 1e3))
        with _mapped(self._peer):
            call = self._stub.WatchMesh(request, metadata=self._metadata)
        return Stream(call, mesh_snapshot_from_pb, self._peer)


@contextlib.contextmanager
def _mapped(peer: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as failure:
        raise error_from_rpc(failure, peer) from failure
    except ValueError as error:  # what the library says of a channel that is closed
        raise UnavailableError("this client is closed; open another one") from error
