"""A scripted `Generation`: records what a front asks, gives what a test tells it to, notices when it is given up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shared.generation import Delta, Finish, GenerateRequest, ModelInfo, Usage
from shared.messages import FinishReason
from tests.fakes.fake_scheduler import ENGINE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from shared.generation import ChatRequest

__all__ = ["Call", "FakeGeneration", "finish", "last"]


def finish(reason: FinishReason = FinishReason.LENGTH, stop: str | int | None = None) -> Finish:
    """How a choice ended; the rest does not reach HTTP."""
    return Finish(reason, 1, 0.0, 0.0, 0.0, stop=stop)


def last(text: str = "", *, choice: int = 0, reason: FinishReason = FinishReason.LENGTH) -> Delta:
    """The last delta of a request of one choice: 3 prompt tokens, 2 of them cached, 5 tokens out."""
    return Delta(text, choice=choice, finish=finish(reason), usage=Usage(3, 5, 2))


class Call:
    """One request: what was asked, and the deltas that it will get."""

    def __init__(self, request: GenerateRequest | ChatRequest) -> None:
        self.request = request
        self.closed = asyncio.Event()
        """The iterator is gone: this is what cancels a request."""
        self.num_taken = 0
        """Deltas that the front has taken."""
        self._deltas: asyncio.Queue[Delta | Exception] = asyncio.Queue()

    def send(self, *deltas: Delta | Exception) -> None:
        """Give deltas; an exception is raised in its place."""
        for delta in deltas:
            self._deltas.put_nowait(delta)

    def accept(self) -> None:
        """Give the first delta; token ids of texts are their bytes, those of a conversation 1, 2 and 3."""
        prompts: tuple[tuple[int, ...], ...] = ()
        if self.request.return_prompt_token_ids:
            texts = self.request.prompts if isinstance(self.request, GenerateRequest) else [(1, 2, 3)]
            prompts = tuple(tuple(text.encode() if isinstance(text, str) else text) for text in texts)
        self.send(Delta(request_id=self.request.request_id, prompt_token_ids=prompts))

    async def run(self) -> AsyncGenerator[Delta, None]:
        try:
            while True:
                delta = await self._deltas.get()
                if isinstance(delta, Exception):
                    raise delta
                self.num_taken += 1
                yield delta
                if delta.usage is not None:
                    return
        finally:
            self.closed.set()


class FakeGeneration:
    """Stands where `services.gateway.generation.Generation` would."""

    def __init__(self) -> None:
        self.info = ModelInfo(ENGINE, (256,), has_chat_template=True)
        self.not_ready: Exception | None = None
        """Raised by everything."""
        self.conversation: ChatRequest | None = None
        """The last one that was tokenized."""
        self.answer: Sequence[Delta | Exception] | None = None
        """What every request gets at once; None leaves that to the test."""
        self._calls: asyncio.Queue[Call] = asyncio.Queue()

    async def call(self) -> Call:
        """Wait for the next request."""
        return await asyncio.wait_for(self._calls.get(), 10)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        return self._run(request)

    def chat(self, request: ChatRequest) -> AsyncGenerator[Delta, None]:
        return self._run(request)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [257] * add_special_tokens + list(text.encode())

    async def tokenize_conversation(self, request: ChatRequest) -> list[int]:
        self.conversation = request
        return [1, 2, 3]

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode()

    def model_info(self) -> ModelInfo:
        if self.not_ready is not None:
            raise self.not_ready
        return self.info

    def _run(self, request: GenerateRequest | ChatRequest) -> AsyncGenerator[Delta, None]:
        call = Call(request)
        if self.answer is not None:
            call.accept()
            call.send(*self.answer)
        self._calls.put_nowait(call)
        return call.run()
