"""A scripted gateway over real gRPC, in threads of its own: for clients with and without asyncio."""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from shared.codec.generation import (
    chat_from_pb,
    delta_to_pb,
    gateway_status_to_pb,
    generate_from_pb,
    model_info_to_pb,
)
from shared.codec.mesh_view import mesh_snapshot_to_pb
from shared.generation import Delta, Finish, GatewayStatus, ModelInfo, Usage
from shared.mesh_view import EngineSnapshot, MeshSnapshot
from shared.messages import EngineInfo, EngineStatus, FinishReason
from shared.pb import gateway_pb2, gateway_pb2_grpc
from shared.rpc import grpc_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shared.errors import OrcaError
    from shared.generation import ChatRequest, GenerateRequest

__all__ = ["ANSWER", "SNAPSHOT", "FakeGateway", "serving"]

INFO = EngineInfo("tiny", 512, 300, 4096, 16, 1, 1, "float32")
STATUS = EngineStatus(ready=True, reason="", epoch=1, info=INFO, workers=())
SNAPSHOT = MeshSnapshot(EngineSnapshot(STATUS, 7), "here", 1)
ANSWER = (
    Delta(request_id="r1"),
    Delta("Once ", (5, 6)),
    Delta("más", (7,)),
    Delta("", (2,), Finish(FinishReason.STOP, 4, 0.5, 1.5, 2.5, stop=2), usage=Usage(3, 4, 1)),
)


@dataclass
class FakeGateway(gateway_pb2_grpc.GatewayServicer):
    """What it answers, and what it was asked."""

    deltas: Sequence[Delta] = ANSWER
    failure: OrcaError | None = None
    """Ends every call, streams after their deltas."""
    hangs: bool = False
    """A stream stays open after its deltas, until the client has gone."""
    asked: list[GenerateRequest | ChatRequest] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    cancelled: queue.Queue[None] = field(default_factory=queue.Queue)
    """One item for each stream that has ended before its end."""
    address: str = ""

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        self.asked.append(generate_from_pb(request))
        return self._stream(context)

    def Chat(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        self.asked.append(chat_from_pb(request))
        return self._stream(context)

    def Tokenize(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._check(context)
        ids = [257] if request.add_special_tokens else []
        return gateway_pb2.TokenizeResponse(token_ids=[*ids, *request.text.encode()])

    def Detokenize(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._check(context)
        return gateway_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def GetModelInfo(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._check(context)
        return model_info_to_pb(ModelInfo(INFO, (2,), has_chat_template=True))

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._check(context)
        return gateway_status_to_pb(GatewayStatus(STATUS, 1))

    def WatchMesh(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        self._check(context)
        yield mesh_snapshot_to_pb(SNAPSHOT)

    def _stream(self, context: grpc.ServicerContext) -> Iterator[Any]:
        self._note(context)
        has_ended = threading.Event()
        is_whole = False

        def note_end() -> None:
            has_ended.set()
            if not is_whole:
                self.cancelled.put(None)

        if not context.add_callback(note_end):
            note_end()
        yield from map(delta_to_pb, self.deltas)
        if self.hangs:
            has_ended.wait()
        is_whole = True
        self._fail(context)

    def _check(self, context: grpc.ServicerContext) -> None:
        self._note(context)
        self._fail(context)

    def _note(self, context: grpc.ServicerContext) -> None:
        self.metadata.append(dict(context.invocation_metadata()))

    def _fail(self, context: grpc.ServicerContext) -> None:
        if self.failure is not None:
            context.abort(grpc_status(self.failure.code), str(self.failure))


@contextlib.contextmanager
def serving(gateway: FakeGateway, tls: grpc.ServerCredentials | None = None) -> Iterator[FakeGateway]:
    """Have a gateway served at a free port."""
    with ThreadPoolExecutor(32) as pool:
        server = grpc.server(pool)
        gateway_pb2_grpc.add_GatewayServicer_to_server(gateway, server)
        free = "127.0.0.1:0"
        port = server.add_insecure_port(free) if tls is None else server.add_secure_port(free, tls)
        gateway.address = f"127.0.0.1:{port}"
        server.start()
        try:
            yield gateway
        finally:
            server.stop(0).wait()
