"""The body of ``POST /v1/completions``."""

from typing import Annotated, Any

from pydantic import Field

from services.gateway.admission import MAX_CHOICES
from services.gateway.http.errors import HttpError
from services.gateway.http.fields import Only, Prompts
from services.gateway.http.generation_body import GenerationBody
from shared.generation import GenerateRequest

__all__ = ["CompletionBody"]


class CompletionBody(GenerationBody):
    """Prompts to continue."""

    prompt: Prompts
    """A text, or token ids, or a list of either; 128 choices in all at most."""
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    """Generate so many for each prompt and give the ``n`` most likely ones; cannot be streamed."""
    echo: bool | None = None
    """Begin each choice with its prompt."""
    logprobs: int | None = Field(default=None, ge=0, le=5)
    """Give log probabilities of the tokens, and so many of the most likely ones."""
    suffix: Annotated[Any, Only("")] = None

    def request(self, request_id: str) -> GenerateRequest:
        """Return what is asked. Raises ``HttpError``."""
        self.check_delivery()
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise HttpError(400, "best_of above n cannot be streamed: which are best shows at the end", param="best_of")
        options = self.options(max_tokens=self.max_tokens, num_logprobs=self.logprobs, best_of=self.best_of)
        return GenerateRequest(self.prompt, options, bool(self.echo), request_id, bool(self.return_token_ids))
