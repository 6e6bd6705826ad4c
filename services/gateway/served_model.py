"""The gateway's side of a model: its tokenizer and its chat templates, found by the name that the engine states.

Knows nothing of weights. Loading reads files and takes up to seconds: it belongs into a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.gateway.text.chat_template import ChatTemplate
from shared.errors import InvalidRequestError, ModelError, OrcaError
from shared.log import get_logger
from shared.model.store import resolve
from shared.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shared.messages import EngineInfo
    from shared.text.tokenizer import Tokenizer

__all__ = ["ModelText", "ServedModel", "load_model_text"]


@dataclass(frozen=True, slots=True)
class ModelText:
    """How a model reads and writes."""

    tokenizer: Tokenizer
    chat_templates: Mapping[str, ChatTemplate]
    """By name, as in transformers: "default" and, where tools have one of their own, "tool_use"."""
    template_problem: str = "it came without one"
    """Why there is no default template."""

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be served."""
        return "default" in self.chat_templates

    def chat_template(self, *, with_tools: bool) -> ChatTemplate:
        """The template for a conversation.

        Raises:
            InvalidRequestError: the model has none, or one that is no valid Jinja.
        """
        template = self.chat_templates.get("tool_use") if with_tools else None
        template = template or self.chat_templates.get("default")
        if template is None:
            raise InvalidRequestError(
                f"this model has no chat template ({self.template_problem}): send a plain prompt (Generate, or "
                "/v1/completions) or use a model that has one"
            )
        return template


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests can be served with: the engine's limits and the text side of it."""

    engine: EngineInfo
    text: ModelText


def load_model_text(name: str) -> ModelText:
    """Load what belongs to the engine's model ``name`` from this host.

    A model whose template is missing or damaged still serves prompts; the log has a warning.

    Raises:
        ModelError: it is not here or cannot be read; the message says what to do on this host.
    """
    try:
        tokenizer = load_tokenizer(resolve(name))
    except OrcaError as error:
        raise ModelError(f"this gateway's host lacks what the engine's model {name!r} needs: {error}") from error
    text = _model_text(tokenizer)
    if not text.has_chat_template:
        get_logger().warning("no_chat_template", model=name, reason=text.template_problem)
    return text


def _model_text(tokenizer: Tokenizer) -> ModelText:
    """Compile the templates that a tokenizer came with, those that can be."""
    templates = {}
    problems = {}
    for template_name, template in tokenizer.chat_templates.items():
        try:
            templates[template_name] = ChatTemplate(
                template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
            )
        except ModelError as error:
            problems[template_name] = str(error)
            get_logger().warning("chat_template_is_broken", name=template_name, reason=str(error))
    return ModelText(tokenizer, templates, problems.get("default", "it came without one"))
