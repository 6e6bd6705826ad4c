"""What the output must match: from what the client wrote to a grammar that is known to be good (``Submit.grammar``).

Knows what each kind of guidance means, in llguidance's notation, and remembers verdicts. Grammars are tried in a
process of their own (`guidance_process`), since the library can take minutes or crash over a hostile one.

Rules that are not the contract's own: white space in JSON is bounded (a model that is pushed towards it would never
end); what the library does not support is refused, never ignored; a match ends the output, so that nothing may forbid
that it ends.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from llguidance import regex_to_lark

from services.gateway.guidance_process import GuidanceProcess
from services.gateway.text.json_text import parse_json
from shared.errors import InvalidRequestError
from shared.generation import Guidance, GuidanceKind
from shared.text.guidance_vocabulary import GuidanceVocabulary

if TYPE_CHECKING:
    from services.gateway.served_model import ServedModel
    from services.gateway.tools import ToolUse
    from shared.generation import GenerateOptions

__all__ = ["JSON_OPTIONS", "MAX_GUIDANCE_BYTES", "GuidanceCompiler", "guidance_grammar"]

MAX_GUIDANCE_BYTES = 64 << 10
MAX_CHOICES = 1024

JSON_OPTIONS = {"whitespace_pattern": r" |\n {0,16}"}
"""llguidance's options for JSON: between two tokens a space, or a line feed and some indentation, and no more."""

_ASCII_CLASSES = "d"
"""What only means ASCII in a regular expression: digits, which few who write ``\\d`` want to have in all scripts."""
_MAX_CACHED_BYTES = 4 << 20
_FIELD = "guidance"
_NAMES = {
    GuidanceKind.JSON_OBJECT: "JSON object",
    GuidanceKind.JSON_SCHEMA: "JSON schema",
    GuidanceKind.REGEX: "regular expression",
    GuidanceKind.CHOICES: "list of choices",
    GuidanceKind.GRAMMAR: "grammar",
}


class GuidanceCompiler:
    """Checks the guidance of requests for the model that is served, one at a time; used by one event loop.

    Args:
        max_cpu_s: processor time for one grammar, seconds: what the last stage will take for it once more.
    """

    def __init__(self, *, max_cpu_s: float = 0.5) -> None:
        self._max_cpu_s = max_cpu_s
        self._turn = asyncio.Lock()
        self._process: GuidanceProcess | None = None
        self._process_model: ServedModel | None = None
        self._verdicts = _Verdicts(_MAX_CACHED_BYTES)

    async def compile(self, options: GenerateOptions, model: ServedModel, tools: ToolUse | None = None) -> str:
        """Return the grammar for ``Submit.grammar``, empty where neither options nor tools ask for one.

        Raises:
            InvalidRequestError: it cannot be followed; the message has the reason, the library's own where it is one.
            ModelError: this model cannot follow any.
            UnavailableError: it could not be checked now.
        """
        guidance = options.guidance if tools is None else tools.guidance
        if guidance is None:
            return ""
        field, name = (_FIELD, f"the {_NAMES[guidance.kind]}") if tools is None else ("tools", "a call of these tools")
        for option, is_set in (("ignore_eos", options.ignore_eos), ("min_tokens", options.min_tokens > 0)):
            if is_set:
                raise InvalidRequestError(f"the output ends with {name}: leave out {option}", field=option)
        grammar = guidance_grammar(guidance)
        async with self._turn:
            verdict = await self._verdict(grammar, model)
        if verdict:
            raise InvalidRequestError(f"{name} cannot be forced: {verdict}", field=field)
        return grammar

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await process.close()

    async def _verdict(self, grammar: str, model: ServedModel) -> str:
        """Why it is no good, empty where it is."""
        if self._process_model is not model and not self._knows(model):
            await self.close()
            self._verdicts = _Verdicts(_MAX_CACHED_BYTES)
            self._process_model = model
        verdict = self._verdicts.get(grammar)
        if verdict is not None:
            return verdict
        if self._process is None:
            vocabulary = await asyncio.to_thread(GuidanceVocabulary.of, model.text.tokenizer, model.engine.vocab_size)
            self._process = await GuidanceProcess.start(vocabulary, max_cpu_s=self._max_cpu_s)
        try:
            verdict = await self._process.check(grammar)
        finally:
            if not self._process.is_usable:
                await self.close()
        self._verdicts.put(grammar, verdict)
        return verdict

    def _knows(self, model: ServedModel) -> bool:
        """Whether the process has the vocabulary of ``model``."""
        known = self._process_model
        return (
            known is not None
            and known.text.tokenizer is model.text.tokenizer
            and known.engine.vocab_size == model.engine.vocab_size
        )


class _Verdicts:
    """What is known of grammars, the longest unused ones forgotten first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_grammar: OrderedDict[str, str] = OrderedDict()

    def get(self, grammar: str) -> str | None:
        """None where it was never seen, or is forgotten."""
        verdict = self._by_grammar.get(grammar)
        if verdict is not None:
            self._by_grammar.move_to_end(grammar)
        return verdict

    def put(self, grammar: str, verdict: str) -> None:
        self._by_grammar[grammar] = verdict
        self._num_bytes += len(grammar) + len(verdict)
        while self._num_bytes > self._max_bytes:
            oldest = self._by_grammar.popitem(last=False)
            self._num_bytes -= sum(map(len, oldest))


def guidance_grammar(guidance: Guidance) -> str:
    """The grammar of ``guidance`` in llguidance's serialised form; whether it is any good is not looked at.

    Raises:
        InvalidRequestError: it is too large, or not even JSON where it must be.
    """
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in (guidance.text, *guidance.choices))
    name = _NAMES[guidance.kind]
    if size > MAX_GUIDANCE_BYTES:
        raise InvalidRequestError(
            f"the {name} has {size} bytes; at most {MAX_GUIDANCE_BYTES} are allowed", field=_FIELD
        )
    match guidance.kind:
        case GuidanceKind.JSON_OBJECT:
            return _json_grammar({"type": "object"})
        case GuidanceKind.JSON_SCHEMA:
            return _json_grammar(_schema(guidance.text))
        case GuidanceKind.REGEX:
            return _lark_grammar(f"start: /{regex_to_lark(_text(guidance.text, name), _ASCII_CLASSES)}/")
        case GuidanceKind.CHOICES:
            return _lark_grammar(_choices(guidance.choices))
        case GuidanceKind.GRAMMAR:
            return _lark_grammar(_text(guidance.text, name))


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = parse_json(text)
    except ValueError as error:
        raise InvalidRequestError(f"the JSON schema is not JSON ({error})", field=_FIELD) from error
    if not isinstance(schema, dict):
        raise InvalidRequestError("the JSON schema is no JSON object", field=_FIELD)
    return schema


def _json_grammar(schema: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": schema | {"x-guidance": JSON_OPTIONS}}]})


def _lark_grammar(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _text(text: str, name: str) -> str:
    if not text:
        raise InvalidRequestError(f"the {name} is empty", field=_FIELD)
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidRequestError(f"the {name} has a lone surrogate, which no UTF-8 text can have", field=_FIELD)
    return text


def _choices(choices: tuple[str, ...]) -> str:
    if not choices:
        raise InvalidRequestError("the list of choices is empty", field=_FIELD)
    if len(choices) > MAX_CHOICES:
        raise InvalidRequestError(f"there are {len(choices)} choices; at most {MAX_CHOICES} are allowed", field=_FIELD)
    texts = [_text(choice, f"choice {index}") for index, choice in enumerate(choices)]
    # One terminal, which costs the same however many there are.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))
