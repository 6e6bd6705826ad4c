"""The bodies of ``POST /tokenize`` and ``POST /detokenize``."""

from services.gateway.http.chat_body import MessageBody, ToolBody, continues
from services.gateway.http.errors import HttpError
from services.gateway.http.fields import Body, Items, OnlyFalse, OnlyNull, TokenIds
from shared.generation import ChatRequest

__all__ = ["DetokenizeBody", "TokenizeBody"]


class TokenizeBody(Body):
    """A text or a conversation to tokenize."""

    model: str | None = None
    """The served model's name; may be left out, since there is one only."""
    prompt: str | None = None
    messages: Items[MessageBody] | None = None
    add_special_tokens: bool | None = None
    """Add what the model wants around every text; default true. Not for messages: there the template does it."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Items[ToolBody] | None = None
    chat_template: OnlyNull = None
    chat_template_kwargs: OnlyNull = None
    return_token_strs: OnlyFalse = None

    def conversation(self) -> ChatRequest | None:
        """Return the conversation, None where it is a text. Raises ``HttpError`` where it is neither or both."""
        if (self.prompt is None) == (self.messages is None):
            raise HttpError(400, "send either prompt or messages", param="prompt")
        if self.messages is None:
            return None
        if self.add_special_tokens:
            raise HttpError(
                400,
                "add_special_tokens does not go with messages: the model's template writes what it needs",
                param="add_special_tokens",
            )
        return ChatRequest(
            [message.message() for message in self.messages],
            tools=tuple(tool.tool() for tool in self.tools or ()),
            continue_final_message=continues(self.add_generation_prompt, self.continue_final_message),
        )


class DetokenizeBody(Body):
    """Token ids to turn into text."""

    model: str | None = None
    """The served model's name; may be left out, since there is one only."""
    tokens: TokenIds
