"""The bodies of ``POST /tokenize`` and ``POST /detokenize``."""

from services.gateway.http.fields import Body, OnlyFalse, TokenIds

__all__ = ["DetokenizeBody", "TokenizeBody"]


class TokenizeBody(Body):
    """A text to tokenize."""

    model: str | None = None
    """The served model's name; may be left out, since there is one only."""
    prompt: str
    add_special_tokens: bool | None = None
    """Add what the model wants around every text; default true."""
    return_token_strs: OnlyFalse = None


class DetokenizeBody(Body):
    """Token ids to turn into text."""

    model: str | None = None
    """The served model's name; may be left out, since there is one only."""
    tokens: TokenIds
