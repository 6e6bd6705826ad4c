from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import torch
from llguidance import LLMatcher
from structlog.testing import capture_logs

from services.worker.sampling.guidance import GrammarCompiler, Guided, Vocabulary
from shared.errors import ModelError
from shared.text.byte_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Guide = Callable[..., Guided]

VOCAB_SIZE = 300
END = 256


@pytest.fixture
def guide() -> Iterator[Guide]:
    compiler = GrammarCompiler(Vocabulary(lambda: ByteTokenizer(VOCAB_SIZE - 10), VOCAB_SIZE))
    yield lambda grammar, output=(): Guided(compiler.compile(grammar, output))
    compiler.close()


def allowed(guided: Guided) -> set[int]:
    logits = torch.zeros(VOCAB_SIZE)
    guided.apply(logits)
    return set(logits.isfinite().nonzero().flatten().tolist())


def bytes_of(token_ids: set[int]) -> set[bytes]:
    tokenizer = ByteTokenizer(VOCAB_SIZE)
    return {tokenizer.token_bytes(token_id) for token_id in token_ids}


def test_only_what_the_grammar_allows_next(guide: Guide) -> None:
    guided = guide(LLMatcher.grammar_from_regex("ab|xy*"))
    assert bytes_of(allowed(guided)) == {b"a", b"x"}
    guided.note(ord("x"))
    assert bytes_of(allowed(guided) - {END}) == {b"y"}
    assert END in allowed(guided)
    guided.note(END)
    assert allowed(guided) == {END}


def test_a_recomputed_sequence_goes_on_where_it_was(guide: Guide) -> None:
    guided = guide(LLMatcher.grammar_from_regex("abc"), [ord("a"), ord("b")])
    assert bytes_of(allowed(guided)) == {b"c"}


def test_random_walks_through_a_schema_are_json(guide: Guide) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 3}, "big": {"type": "boolean"}},
        "required": ["name", "big"],
        "additionalProperties": False,
    }
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        guided, text = guide(grammar), b""
        while (token_id := int(torch.multinomial(_weights(guided), 1, generator=generator))) != END:
            guided.note(token_id)
            text += bytes([token_id])
        assert re.fullmatch(r'\{"name":".*","big":(true|false)\}', text.decode(), re.DOTALL)
        assert json.loads(text)


def _weights(guided: Guided) -> torch.Tensor:
    logits = torch.zeros(VOCAB_SIZE)
    guided.apply(logits)
    return logits[:257].exp()


@pytest.mark.parametrize("grammar", ["{", '{"grammars": [{"lark_grammar": "start: nothing_here"}]}', "start: /(/"])
def test_grammar_that_cannot_be_read_bars_everything_and_tells_no_text(guide: Guide, grammar: str) -> None:
    with capture_logs() as events:
        assert allowed(guide(grammar)) == set()
    assert [event["event"] for event in events] == ["grammar_failed"]
    assert events[0]["reason"] == "InvalidRequestError"
    assert "nothing_here" not in str(events)


def test_token_that_does_not_fit_fails_its_own_sequence(guide: Guide) -> None:
    good, bad = guide(LLMatcher.grammar_from_regex("ab")), guide(LLMatcher.grammar_from_regex("ab"))
    assert bytes_of(allowed(bad)) == {b"a"}
    bad.note(ord("z"))
    with capture_logs() as events:
        assert allowed(bad) == set()
    assert events[0]["reason"] == "InternalError"
    assert bytes_of(allowed(good)) == {b"a"}


def test_model_without_an_end_has_no_grammars() -> None:
    class Endless(ByteTokenizer):
        eos_token_ids: frozenset[int] = frozenset()

    with pytest.raises(ModelError, match="no token that ends a text"):
        Vocabulary(lambda: Endless(VOCAB_SIZE), VOCAB_SIZE).tokens()
    compiler = GrammarCompiler(Vocabulary(lambda: Endless(VOCAB_SIZE), VOCAB_SIZE))
    with capture_logs() as events:
        assert allowed(Guided(compiler.compile(LLMatcher.grammar_from_regex("a"), []))) == set()
    compiler.close()
    assert events[0]["reason"] == "ModelError"


def test_tokenizer_is_read_once() -> None:
    num_loads = 0

    def load() -> ByteTokenizer:
        nonlocal num_loads
        num_loads += 1
        return ByteTokenizer(VOCAB_SIZE)

    vocabulary = Vocabulary(load, VOCAB_SIZE)
    assert num_loads == 0
    assert vocabulary.tokens() is vocabulary.tokens()
    assert num_loads == 1
