"""The gateway's side of a model: its tokenizer and its chat template, found by the name that the engine states.

Knows nothing of weights. Loading reads files and takes up to seconds: it belongs into a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.gateway.text.chat_template import ChatTemplate
from shared.errors import ModelError, OrcaError
from shared.model.store import resolve
from shared.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from shared.messages import EngineInfo
    from shared.text.tokenizer import Tokenizer

__all__ = ["ModelText", "ServedModel", "load_model_text"]


@dataclass(frozen=True, slots=True)
class ModelText:
    """How a model reads and writes."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate

    @property
    def has_chat_template(self) -> bool:
        """Whether the model came with a template of its own."""
        return self.tokenizer.chat_template is not None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests can be served with: the engine's limits and the text side of it."""

    engine: EngineInfo
    text: ModelText


def load_model_text(name: str) -> ModelText:
    """Load what belongs to the engine's model ``name`` from this host.

    Raises:
        ModelError: it is not here or cannot be read; the message says what to do on this host.
    """
    try:
        tokenizer = load_tokenizer(resolve(name))
        template = ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    except OrcaError as error:
        raise ModelError(f"this gateway's host lacks what the engine's model {name!r} needs: {error}") from error
    return ModelText(tokenizer, template)
