"""Whether requests can be served, and what is missing when they cannot.

Three things must be there: a session with the scheduler, a ready engine behind it, and the text side of the engine's
model, which is loaded here in a thread, once for each model. `SchedulerClient` reports the first two; this module tells
the health service and the servicer. It does not know requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from services.gateway.served_model import ModelText, ServedModel
from shared.errors import OrcaError, UnavailableError
from shared.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import NoReturn

    from shared.messages import EngineInfo

__all__ = ["Readiness"]


class Readiness:
    """The gateway's answer to "can you take a request?"."""

    def __init__(self, load: Callable[[str], ModelText]) -> None:
        """``load`` gets the name of the model and may block."""
        self._load = load
        self._engine: EngineInfo | None = None
        self._why_no_engine = "the scheduler has not been reached yet"
        self._text_of: str | None = None
        self._text: ModelText | None = None
        self._draining = False
        self._changed = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether the gateway is leaving."""
        return self._draining

    def missing(self) -> OrcaError | None:
        """Return why a request cannot be served now, None when it can."""
        served = self._served()
        return None if isinstance(served, ServedModel) else served

    def require(self, *, accepted: bool = False) -> ServedModel:
        """Return the model to serve a request with; one that is ``accepted`` already is served while leaving, too.

        Raises:
            UnavailableError: the scheduler, the engine or the tokenizer is not there (yet), or the gateway is leaving.
        """
        served = self._served(accepted=accepted)
        if isinstance(served, ServedModel):
            return served
        raise served

    def _served(self, *, accepted: bool = False) -> ServedModel | OrcaError:
        if self._draining and not accepted:
            return UnavailableError("the gateway is shutting down; send the request again, or to another gateway")
        if self._engine is None:
            return UnavailableError(f"not ready: {self._why_no_engine}; try again in a moment")
        if self._text_of != self._engine.model or self._text is None:
            return UnavailableError(
                f"not ready: the tokenizer of {self._engine.model!r} is being loaded; try again in a moment"
            )
        return ServedModel(self._engine, self._text)

    def engine_missing(self, why: str) -> None:
        """Take note of what the scheduler says of an engine that is not ready; one that has been reported stays."""
        if self._engine is None:
            self._no_engine(why)

    def session_lost(self, reason: str) -> None:
        """Take note that the scheduler is gone."""
        self._no_engine(f"the scheduler cannot be reached ({reason})")

    def engine_lost(self) -> None:
        """Take note that the engine is gone while the session stays."""
        self._no_engine("the engine lost a worker and is recovering")

    def engine_ready(self, engine: EngineInfo) -> None:
        """Take note of the engine."""
        self._engine = engine
        self._changed.set()

    def drain(self) -> None:
        """Take no request any more."""
        self._draining = True
        self._changed.set()

    def _no_engine(self, why: str) -> None:
        self._engine = None
        self._why_no_engine = why
        self._changed.set()

    async def run(self, publish: Callable[[bool], Awaitable[None]]) -> NoReturn:
        """Load what the engine's model needs and ``publish`` each change of readiness.

        A gateway that cannot read its engine's model can do nothing for anybody: ``ModelError`` ends the service.
        """
        published = False
        while True:
            await self._changed.wait()
            self._changed.clear()
            missing = self.missing()
            if published is not (missing is None):
                published = missing is None
                await publish(published)
                if missing is None:
                    assert self._engine is not None
                    get_logger().info("service_ready", **dataclasses.asdict(self._engine))
                else:
                    get_logger().warning("service_not_ready", reason=str(missing))
            engine = self._engine
            if engine is None or (self._text_of == engine.model and self._text is not None):
                continue
            self._text = await asyncio.to_thread(self._load, engine.model)
            self._text_of = engine.model
            self._changed.set()
