"""Whatever a model would write, under guidance it writes what was asked for; what cannot be asked for is refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from services.gateway.guidance import MAX_GUIDANCE_BYTES, GuidanceCompiler, guidance_grammar
from services.gateway.guidance_process import GuidanceProcess
from services.gateway.served_model import ModelText, ServedModel
from services.gateway.text.tool_calls import HERMES
from services.gateway.tools import ToolUse
from shared.errors import InvalidRequestError, ModelError, UnavailableError
from shared.generation import GenerateOptions, Guidance, GuidanceKind
from shared.messages import EngineInfo
from shared.text.byte_tokenizer import ByteTokenizer
from shared.text.guidance_vocabulary import guidance_matcher
from tests.guided_walk import GuidedWalker, allowed_ids
from tests.vocabularies import KINDS, load_vocabulary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SEEDS = range(4)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "mail": {"type": ["string", "null"], "pattern": "^[a-z]{1,8}@[a-z]{1,8}$"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "maxItems": 3, "minItems": 1},
        "friends": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ANY_OF: dict[str, Any] = {
    "anyOf": [
        {"$ref": "#/$defs/point"},
        {"type": "number", "exclusiveMinimum": -2.5, "maximum": 100},
        {"const": "none"},
    ],
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
}
REGEXES = [
    r"[A-Z][a-z]+ [0-9]{3}",
    r"(\d{1,3}\.){3}\d{1,3}",
    r"a/b|c\"d|é+🙂?",
    r"^(yes|no)$",
    r"\n? {2}x",
    r"//.{0,5}",
    r"[^\n]{0,9}#",
]
CALCULATION = """
start: sum
sum: product ("+" product)*
product: NUMBER ("*" NUMBER)*
NUMBER: /[0-9]{1,3}/
%ignore / {1,2}/
"""


@pytest.fixture(scope="module", params=KINDS)
def walker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GuidedWalker:
    return GuidedWalker(load_vocabulary(request.param, tmp_path_factory.mktemp("vocabulary")))


def _write(walker: GuidedWalker, guidance: Guidance, seed: int) -> str:
    return walker.text(walker.write(guidance_grammar(guidance), seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_json_object_is_one(walker: GuidedWalker, seed: int) -> None:
    assert isinstance(json.loads(_write(walker, Guidance(GuidanceKind.JSON_OBJECT), seed)), dict)


@pytest.mark.parametrize("schema", [PERSON, ANY_OF, {"type": "array", "items": {}, "minItems": 2}])
def test_json_is_what_its_schema_says(walker: GuidedWalker, schema: dict[str, Any]) -> None:
    for seed in SEEDS:
        text = _write(walker, Guidance(GuidanceKind.JSON_SCHEMA, json.dumps(schema)), seed)
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("pattern", REGEXES)
def test_a_text_matches_its_regular_expression(walker: GuidedWalker, pattern: str) -> None:
    for seed in SEEDS:
        assert re.fullmatch(pattern, _write(walker, Guidance(GuidanceKind.REGEX, pattern), seed))


def test_a_choice_is_one_of_them_and_each_can_be_had(walker: GuidedWalker) -> None:
    choices = ("yes", "yes, please", 'no "thanks"\n', "é🙂", "\\d")
    guidance = Guidance(GuidanceKind.CHOICES, choices=choices)
    assert {_write(walker, guidance, seed) for seed in range(80)} == set(choices)


def test_a_text_is_of_its_grammar(walker: GuidedWalker) -> None:
    for seed in SEEDS:
        text = _write(walker, Guidance(GuidanceKind.GRAMMAR, CALCULATION), seed)
        assert re.fullmatch(r" *\d+( *[+*] *\d+)* *", text)


def test_white_space_in_json_is_bounded() -> None:
    """A model that writes white space wherever it may (scenario 29)."""
    walker = GuidedWalker(ByteTokenizer(258))
    for schema in ({"type": "object"}, {"type": "array"}, PERSON):
        matcher = guidance_matcher(
            walker.library, guidance_grammar(Guidance(GuidanceKind.JSON_SCHEMA, json.dumps(schema)))
        )
        text = b""
        for _ in range(400):
            allowed = allowed_ids(matcher, 258)
            outside_of_strings = text.replace(b'\\"', b"").count(b'"') % 2 == 0
            blank = [byte for byte in b"\n \t\r" if byte in allowed] if outside_of_strings else []
            structure = [byte for byte in b'"[,:{' if byte in allowed]
            choice = (blank or structure or allowed)[0]
            if choice >= 256:
                break
            matcher.consume_token(choice)
            text += bytes([choice])
        runs = [len(run) for run in re.findall(rb"[ \n\t\r]+", re.sub(rb'"[^"]*"?', b"s", text))]
        assert runs
        assert max(runs) <= 17


@pytest.mark.parametrize(
    ("guidance", "message"),
    [
        (Guidance(GuidanceKind.JSON_SCHEMA, "{"), "JSON schema is not JSON"),
        (Guidance(GuidanceKind.JSON_SCHEMA, "[" * 50_000), "JSON schema is not JSON"),
        *(
            (Guidance(GuidanceKind.JSON_SCHEMA, '{"a":' * depth + "{}" + "}" * depth), "nested more than 256 levels")
            for depth in range(900, 1000, 7)
        ),
        (Guidance(GuidanceKind.JSON_SCHEMA, "true"), "no JSON object"),
        (Guidance(GuidanceKind.JSON_SCHEMA, ""), "JSON schema is not JSON"),
        (Guidance(GuidanceKind.JSON_SCHEMA, json.dumps({"enum": ["x" * (1 << 20)]})), "at most 65536 are allowed"),
        (Guidance(GuidanceKind.REGEX, ""), "regular expression is empty"),
        (Guidance(GuidanceKind.REGEX, "a\ud800"), "lone surrogate"),
        (Guidance(GuidanceKind.CHOICES), "list of choices is empty"),
        (Guidance(GuidanceKind.CHOICES, choices=("a", "")), "choice 1 is empty"),
        (Guidance(GuidanceKind.CHOICES, choices=("a",) * 2000), "2000 choices"),
        (Guidance(GuidanceKind.CHOICES, choices=("a" * 999,) * 99), "98901 bytes"),
        (Guidance(GuidanceKind.GRAMMAR, ""), "grammar is empty"),
    ],
)
def test_what_can_be_no_guidance_is_refused(guidance: Guidance, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        guidance_grammar(guidance)
    assert refusal.value.field == "guidance"


def _model(vocab_size: int = 300) -> ServedModel:
    engine = EngineInfo("m", 1024, vocab_size, 1024, 16, 1, 1, "float32")
    return ServedModel(engine, ModelText(ByteTokenizer(max(258, vocab_size)), {}))


@pytest.fixture
async def compiler() -> AsyncIterator[GuidanceCompiler]:
    compiler = GuidanceCompiler()
    yield compiler
    await compiler.close()


async def _refusal(compiler: GuidanceCompiler, guidance: Guidance) -> str:
    with pytest.raises(InvalidRequestError) as refusal:
        await compiler.compile(GenerateOptions(guidance=guidance), _MODEL)
    assert refusal.value.field == "guidance"
    return str(refusal.value)


_MODEL = _model()
UNPRODUCTIVE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


async def test_good_guidance_becomes_a_grammar(compiler: GuidanceCompiler) -> None:
    for guidance in (
        Guidance(GuidanceKind.JSON_OBJECT),
        Guidance(GuidanceKind.JSON_SCHEMA, json.dumps(PERSON)),
        Guidance(GuidanceKind.REGEX, r"\d+"),
        Guidance(GuidanceKind.CHOICES, choices=("a", "b")),
        Guidance(GuidanceKind.GRAMMAR, CALCULATION),
    ):
        assert await compiler.compile(GenerateOptions(guidance=guidance), _MODEL) == guidance_grammar(guidance)
    assert await compiler.compile(GenerateOptions(), _MODEL) == ""


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GuidanceKind.JSON_SCHEMA, '{"type": "foo"}', "the JSON schema cannot be forced: Invalid type: foo"),
        (GuidanceKind.JSON_SCHEMA, '{"not": {}}', r'Unimplemented keys: \["not"\]'),
        (GuidanceKind.JSON_SCHEMA, '{"not": {}, "x-guidance": {"lenient": true}}', "Unimplemented keys"),
        (GuidanceKind.JSON_SCHEMA, '{"$ref": "https://example.com/schema"}', "not present in a registry"),
        (GuidanceKind.JSON_SCHEMA, '{"$ref": "#/$defs/none"}', "does not exist"),
        (GuidanceKind.JSON_SCHEMA, json.dumps(UNPRODUCTIVE), "nothing can ever match it"),
        (GuidanceKind.JSON_SCHEMA, '{"type": "string", "format": "unheard-of"}', "format"),
        (GuidanceKind.REGEX, "(a", "regular expression cannot be forced: .*regex parse error"),
        (GuidanceKind.REGEX, "(?=a)b", "look-around"),
        (GuidanceKind.REGEX, r"(a)\1", "backreferences"),
        (GuidanceKind.REGEX, "(" * 9000 + ")" * 9000, "cannot be forced"),
        (GuidanceKind.GRAMMAR, "start: start 'a'", "grammar cannot be forced"),
        (GuidanceKind.GRAMMAR, 'start: start "a"', "nothing can ever match it"),
        (GuidanceKind.GRAMMAR, "start: <|no_such_token|>", "unknown special token"),
        (GuidanceKind.GRAMMAR, '{"grammars": []}', "grammar cannot be forced"),
    ],
)
async def test_bad_guidance_is_refused_with_the_reason(
    compiler: GuidanceCompiler, kind: GuidanceKind, text: str, message: str
) -> None:
    refusal = await _refusal(compiler, Guidance(kind, text))
    assert re.search(message, refusal, re.DOTALL)
    assert len(refusal) < 700


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GuidanceKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 99999989}'),  # minutes
        (GuidanceKind.REGEX, "(a{1000}){1000}"),
    ],
)
async def test_guidance_that_explodes_is_refused_in_time_and_the_next_is_not(
    compiler: GuidanceCompiler, kind: GuidanceKind, text: str
) -> None:
    async with asyncio.timeout(30):
        assert "more than 0.5 s of processor time" in await _refusal(compiler, Guidance(kind, text))
        assert await compiler.compile(GenerateOptions(guidance=Guidance(GuidanceKind.JSON_OBJECT)), _MODEL)


async def test_a_verdict_is_remembered(compiler: GuidanceCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def check(self: GuidanceProcess, grammar: str) -> str:
        asked.append(grammar)
        return "a reason" if "bad" in grammar else ""

    monkeypatch.setattr(GuidanceProcess, "check", check)
    for _ in range(3):
        assert "a reason" in await _refusal(compiler, Guidance(GuidanceKind.REGEX, "bad"))
        assert await compiler.compile(GenerateOptions(guidance=Guidance(GuidanceKind.REGEX, "good")), _MODEL)
    assert len(asked) == 2
    for number in range(100):  # 6 MB of them: the first are forgotten
        large = Guidance(GuidanceKind.REGEX, f"{number}".rjust(60_000, "x"))
        await compiler.compile(GenerateOptions(guidance=large), _MODEL)
    await compiler.compile(GenerateOptions(guidance=Guidance(GuidanceKind.REGEX, "good")), _MODEL)
    assert len(asked) == 103


async def test_requests_at_the_same_time_share_a_process(compiler: GuidanceCompiler) -> None:
    guidances = [Guidance(GuidanceKind.REGEX, f"a{{{n}}}") for n in range(1, 20)]
    grammars = await asyncio.gather(
        *(compiler.compile(GenerateOptions(guidance=guidance), _MODEL) for guidance in guidances)
    )
    assert grammars == [guidance_grammar(guidance) for guidance in guidances]


async def test_a_request_that_gives_up_harms_no_other(compiler: GuidanceCompiler) -> None:
    slow = Guidance(GuidanceKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 99999989}')
    assert await compiler.compile(GenerateOptions(guidance=Guidance(GuidanceKind.REGEX, "a")), _MODEL)
    given_up = asyncio.create_task(compiler.compile(GenerateOptions(guidance=slow), _MODEL))
    waiting = asyncio.create_task(
        compiler.compile(GenerateOptions(guidance=Guidance(GuidanceKind.JSON_OBJECT)), _MODEL)
    )
    await asyncio.wait([given_up], timeout=0.1)  # the process has been asked
    given_up.cancel()
    assert await waiting == guidance_grammar(Guidance(GuidanceKind.JSON_OBJECT))
    with pytest.raises(asyncio.CancelledError):
        await given_up


async def test_a_process_that_somebody_kills_is_nobodys_fault(compiler: GuidanceCompiler) -> None:
    options = GenerateOptions(guidance=Guidance(GuidanceKind.JSON_OBJECT))
    await compiler.compile(options, _MODEL)
    assert compiler._process is not None
    os.kill(compiler._process._process.pid, signal.SIGKILL)
    other = GenerateOptions(guidance=Guidance(GuidanceKind.REGEX, "a"))
    with pytest.raises(UnavailableError, match="try again"):
        await compiler.compile(other, _MODEL)
    assert await compiler.compile(other, _MODEL)


async def test_another_model_has_another_vocabulary(compiler: GuidanceCompiler) -> None:
    options = GenerateOptions(guidance=Guidance(GuidanceKind.GRAMMAR, "start: <[400]>"))
    with pytest.raises(InvalidRequestError, match="400"):
        await compiler.compile(options, _model(300))
    assert await compiler.compile(options, _model(500))
    with pytest.raises(ModelError, match="no token that ends a text"):
        await compiler.compile(options, _model(256))


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 3}])
async def test_nothing_may_forbid_that_a_match_ends(compiler: GuidanceCompiler, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"leave out {next(iter(options))}"):
        await compiler.compile(GenerateOptions(guidance=Guidance(GuidanceKind.JSON_OBJECT), **options), _MODEL)


def test_the_limit_is_as_documented() -> None:
    guidance_grammar(Guidance(GuidanceKind.REGEX, "a" * MAX_GUIDANCE_BYTES))
    with pytest.raises(InvalidRequestError):
        guidance_grammar(Guidance(GuidanceKind.REGEX, "a" * (MAX_GUIDANCE_BYTES + 1)))


async def test_a_call_that_cannot_be_forced_is_the_tools_fault(compiler: GuidanceCompiler) -> None:
    def use(parameters: str) -> ToolUse:
        guidance = Guidance(GuidanceKind.GRAMMAR, f"start: %json {parameters}")
        return ToolUse((), HERMES, {}, guidance)

    assert await compiler.compile(GenerateOptions(), _MODEL, use("{}"))
    with pytest.raises(InvalidRequestError, match=r"tools cannot be forced: .*Unimplemented") as refusal:
        await compiler.compile(GenerateOptions(), _MODEL, use('{"not": {}}'))
    assert refusal.value.field == "tools"
    with pytest.raises(InvalidRequestError, match="ends with a call of these tools: leave out ignore_eos"):
        await compiler.compile(GenerateOptions(ignore_eos=True), _MODEL, use("{}"))
    assert await compiler.compile(GenerateOptions(ignore_eos=True), _MODEL, ToolUse((), HERMES, {}, None)) == ""
