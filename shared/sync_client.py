"""The Python API without asyncio: the client of the gateway for scripts, notebooks and threads.

::

    with SyncGatewayClient("127.0.0.1:50051") as client:
        for delta in client.generate("The capital of France is", GenerateOptions(max_tokens=8)):
            print(delta.text, end="")

It has the methods of ``shared.client.GatewayClient`` and the same errors; only waiting is different.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from shared.background_loop import BackgroundLoop, Stream
from shared.client import GatewayClient
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
from shared.mesh_view import DEFAULT_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from shared.mesh_view import MeshSnapshot
    from shared.tls import TlsCredentials

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


class SyncGatewayClient:
    """A client of the gateway at ``address`` (host:port). It connects with the first call; threads may share it.

    It has a thread of its own, until it is closed.
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

        async def connect() -> GatewayClient:
            return GatewayClient(address, api_key=api_key, tls=tls, timeout_s=timeout_s)

        self._loop = BackgroundLoop(f"client of the gateway at {address}")
        try:
            self._client = self._loop.call(connect)
        except BaseException:
            self._loop.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is running and close the connection."""
        self._loop.close(self._client.close)

    def generate(
        self,
        prompt: str | Sequence[int] | GenerateRequest,
        options: GenerateOptions | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Stream[Delta]:
        """Continue a prompt, given as text, as token ids, or with all that goes with it; the last delta has ``usage``.

        ``options`` and ``request_id`` take the place of the request's own. The request starts at once; its errors come
        with the deltas.

        Raises:
            InvalidRequestError: the request can never succeed as it is.
            OverloadedError: the gateway or the scheduler is full; try again later.
            UnavailableError: the gateway is not there, not ready or leaving.
            OrcaError: anything else, a missed ``timeout_s`` too; ``code`` is the status.
        """
        return self._loop.stream(
            lambda: self._client.generate(prompt, options, request_id=request_id, timeout_s=timeout_s)
        )

    def chat(
        self,
        messages: Sequence[ChatMessage] | ChatRequest,
        options: GenerateOptions | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Stream[Delta]:
        """Answer a conversation through the model's own chat template; errors as in ``generate``."""
        return self._loop.stream(
            lambda: self._client.chat(messages, options, request_id=request_id, timeout_s=timeout_s)
        )

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with the tokens that the model wants around every text or without."""
        return self._loop.call(lambda: self._client.tokenize(text, add_special_tokens=add_special_tokens))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return self._loop.call(lambda: self._client.detokenize(token_ids))

    def model_info(self) -> ModelInfo:
        """Return the model that is served and its limits."""
        return self._loop.call(self._client.model_info)

    def status(self) -> GatewayStatus:
        """Return the state of the engine behind the gateway."""
        return self._loop.call(self._client.status)

    def watch(self, interval_s: float = DEFAULT_INTERVAL_S) -> Stream[MeshSnapshot]:
        """Give a snapshot of the mesh at once and then every ``interval_s`` seconds, until the gateway leaves.

        Raises:
            InvalidRequestError: the interval is out of range.
            OverloadedError: too many watch already.
            UnavailableError: the gateway is not there, or not any more.
        """
        return self._loop.stream(lambda: self._client.watch(interval_s))
