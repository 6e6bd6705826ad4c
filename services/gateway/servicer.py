"""The gateway's gRPC face: messages in, messages out, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any, TypeVar

from services.gateway.admission import check_num_messages, check_num_prompts, check_num_tool_calls
from shared.codec.generation import (
    chat_from_pb,
    delta_to_pb,
    gateway_status_to_pb,
    generate_from_pb,
    model_info_to_pb,
)
from shared.codec.mesh_view import mesh_snapshot_to_pb
from shared.generation import ChatRequest, GenerateRequest
from shared.mesh_view import DEFAULT_INTERVAL_S
from shared.pb import gateway_pb2, gateway_pb2_grpc
from shared.rpc import request_id_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from grpc import aio

    from services.gateway.generation import Generation
    from services.gateway.watch import MeshWatch
    from shared.generation import Delta

    _Context = aio.ServicerContext[Any, Any]

__all__ = ["GatewayServicer"]

_LAST_WORD_S = 1.0
"""What a client that has stopped reading may take, once its time is over, to read that it is."""

_Request = TypeVar("_Request", GenerateRequest, ChatRequest)


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """Implements ``orca.v1.Gateway``; typed errors become statuses in `RpcServer`."""

    def __init__(self, generation: Generation, watch: MeshWatch) -> None:
        self._generation = generation
        self._watch = watch

    def Generate(  # noqa: N802 - the contract's name
        self, request: gateway_pb2.GenerateRequest, context: _Context
    ) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        """Stream the continuation of a prompt."""
        check_num_prompts(len(request.prompts))
        wanted = _named(generate_from_pb(request), context)
        deltas = self._generation.generate(wanted, call_timeout_s=context.time_remaining())
        return _responses(deltas, wanted.options.timeout_s)

    def Chat(  # noqa: N802 - the contract's name
        self, request: gateway_pb2.ChatRequest, context: _Context
    ) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        """Stream the answer to a conversation."""
        check_num_messages(len(request.messages))
        check_num_tool_calls(sum(len(message.tool_calls) for message in request.messages))
        wanted = _named(chat_from_pb(request), context)
        deltas = self._generation.chat(wanted, call_timeout_s=context.time_remaining())
        return _responses(deltas, wanted.options.timeout_s)

    async def Tokenize(  # noqa: N802 - the contract's name
        self, request: gateway_pb2.TokenizeRequest, context: _Context
    ) -> gateway_pb2.TokenizeResponse:
        """Tokenize a text; special tokens are added unless the client says no."""
        del context
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        ids = await self._generation.tokenize(request.text, add_special_tokens=add_special_tokens)
        return gateway_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(  # noqa: N802 - the contract's name
        self, request: gateway_pb2.DetokenizeRequest, context: _Context
    ) -> gateway_pb2.DetokenizeResponse:
        """Return the text of token ids."""
        del context
        return gateway_pb2.DetokenizeResponse(text=await self._generation.detokenize(request.token_ids))

    async def GetModelInfo(  # noqa: N802 - the contract's name
        self, request: gateway_pb2.GetModelInfoRequest, context: _Context
    ) -> gateway_pb2.GetModelInfoResponse:
        """Return the model and its limits."""
        del request, context
        return model_info_to_pb(self._generation.model_info())

    async def GetStatus(  # noqa: N802 - the contract's name
        self, request: gateway_pb2.GetStatusRequest, context: _Context
    ) -> gateway_pb2.GetStatusResponse:
        """Return the state of engine and gateway."""
        del request, context
        return gateway_status_to_pb(await self._generation.status())

    async def WatchMesh(  # noqa: N802 - the contract's name
        self, request: gateway_pb2.WatchMeshRequest, context: _Context
    ) -> AsyncGenerator[gateway_pb2.MeshSnapshot, None]:
        """Stream snapshots of the mesh until the watcher leaves."""
        del context
        interval_s = request.interval_ms / 1e3 if request.HasField("interval_ms") else DEFAULT_INTERVAL_S
        async with contextlib.aclosing(self._watch.snapshots(interval_s)) as snapshots:
            async for snapshot in snapshots:
                yield mesh_snapshot_to_pb(snapshot)


def _named(request: _Request, context: _Context) -> _Request:
    """Return the request with the name that its metadata give it, where it has none itself."""
    if request.request_id:
        return request
    return dataclasses.replace(request, request_id=request_id_of(context) or "")


async def _responses(
    deltas: AsyncGenerator[Delta, None], timeout_s: float | None
) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
    """Translate; the deltas are closed, and thus their request cancelled, as soon as the client leaves.

    A client that does not even read that its time is over is left: its call is cancelled.
    """
    with _cancelled_after(timeout_s):
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                yield delta_to_pb(delta)


@contextlib.contextmanager
def _cancelled_after(timeout_s: float | None) -> Iterator[None]:
    call = asyncio.current_task()
    if timeout_s is None or not 0 < timeout_s < math.inf or call is None:  # one that is no time is refused later
        yield
        return
    timer = asyncio.get_running_loop().call_later(timeout_s + _LAST_WORD_S, call.cancel)
    try:
        yield
    finally:
        timer.cancel()
