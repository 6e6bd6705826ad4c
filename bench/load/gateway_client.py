"""The gateway's gRPC API as a load client sees it, on the public typed client.

A delta brings output where it has tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.load.endpoint import ServedModel
from bench.load.request_options import Api, PromptFormat
from bench.load.words import text_of
from shared.clock import SystemClock
from shared.errors import ProtocolError
from shared.generation import ChatMessage, GenerateOptions

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from bench.load.records import Reception
    from bench.load.request_options import RequestOptions
    from bench.load.traces import TraceRequest
    from shared.client import GatewayClient
    from shared.clock import Clock
    from shared.generation import Delta

__all__ = ["GatewayLoadClient"]


class GatewayLoadClient:
    """A `LoadClient` over gRPC."""

    def __init__(self, client: GatewayClient, options: RequestOptions, clock: Clock | None = None) -> None:
        self._client = client
        self._options = options
        self._clock = clock or SystemClock()

    async def models(self) -> Sequence[ServedModel]:
        """Return the one model that is served."""
        engine = (await self._client.model_info()).engine
        return [ServedModel(engine.model, engine.vocab_size, engine.max_model_len)]

    async def send(self, request: TraceRequest, reception: Reception) -> None:
        """Stream an output."""
        now_ns = self._clock.now_ns
        times_ns = reception.event_times_ns
        usage = None
        async for delta in self._deltas(request):
            if delta.token_ids or delta.finish:
                reception.ended_ns = now_ns()
                if delta.token_ids:
                    times_ns.append(reception.ended_ns)
            usage = delta.usage
        if usage is None:
            raise ProtocolError("the stream ended without its usage: it is cut off")
        reception.num_prompt_tokens = usage.num_prompt_tokens
        reception.num_output_tokens = usage.num_output_tokens

    def _deltas(self, request: TraceRequest) -> AsyncGenerator[Delta, None]:
        asked = self._options
        options = GenerateOptions(
            max_tokens=request.max_tokens, temperature=asked.temperature, ignore_eos=asked.ignore_eos
        )
        if asked.api is Api.CHAT:
            return self._client.chat([ChatMessage("user", text_of(request.prompt))], options)
        is_text = asked.prompt_format is PromptFormat.TEXT
        return self._client.generate(text_of(request.prompt) if is_text else request.prompt, options)
