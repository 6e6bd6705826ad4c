"""What all requests of a run have in common; light, for the command line imports it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Api", "PromptFormat", "RequestOptions"]


class Api(enum.StrEnum):
    """Which of OpenAI's endpoints is called; over gRPC, `Generate` or `Chat`."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class PromptFormat(enum.StrEnum):
    """How prompts are sent."""

    TOKEN_IDS = "token-ids"
    """As drawn; vLLM and orca take them."""
    TEXT = "text"
    """As words, about one token each; conversations have no other form."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What all requests of a run have in common."""

    model: str
    api: Api = Api.COMPLETIONS
    prompt_format: PromptFormat = PromptFormat.TOKEN_IDS
    temperature: float = 0.0
    ignore_eos: bool = True
    """Outputs are as long as the trace wants; an extension that vLLM and orca know."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the body, over HTTP; they win."""

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if self.api is Api.CHAT and self.prompt_format is not PromptFormat.TEXT:
            raise ConfigError("conversations are text: give --prompt-format text with --api chat")
