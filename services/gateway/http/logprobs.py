"""Log probabilities in the shapes of OpenAI's two endpoints.

JSON has no infinity: what is less likely than `LEAST_LOGPROB`, impossible tokens included, is shown as that.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shared.generation import TokenLogprob, TopLogprob

__all__ = ["LEAST_LOGPROB", "CompletionLogprobs", "chat_logprobs"]

LEAST_LOGPROB = -9999.0


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return ``{"content": […], "refusal": null}``, one entry for each token."""
    return {
        "content": [{**_entry(token), "top_logprobs": [_entry(top) for top in token.top]} for token in tokens],
        "refusal": None,
    }


def _entry(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": token.token, "bytes": list(token.token_bytes), "logprob": _finite(token.logprob)}


class CompletionLogprobs:
    """The completions shape of one choice; ``text_offset`` runs on from delta to delta."""

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Return the parallel lists for the next tokens of the choice's text."""
        names: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token in tokens:
            name = _name(token)
            value = _finite(token.logprob)
            names.append(name)
            values.append(value)
            offsets.append(self._offset)
            # The chosen token is among them, however unlikely; the first token of a prompt has no others.
            tops.append(
                None if value is None else {_name(top): _least(top.logprob) for top in token.top} | {name: value}
            )
            self._offset += len(self._decoder.decode(token.token_bytes))
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _name(token: TokenLogprob | TopLogprob) -> str:
    r"""Return the token as text, or, where it is a part of a character, as OpenAI does: ``bytes:\xf0\x9f``."""
    try:
        token.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)
    return token.token


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else _least(logprob)


def _least(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
