from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from shared.errors import InvalidRequestError, ModelError
from shared.text.byte_tokenizer import ByteTokenizer
from shared.text.guidance_vocabulary import GuidanceVocabulary, guidance_matcher
from tests.guided_walk import GuidedWalker, allowed_ids
from tests.vocabularies import KINDS, load_vocabulary

if TYPE_CHECKING:
    from shared.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_vocabulary(request.param, tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def walker(tokenizer: Tokenizer) -> GuidedWalker:
    return GuidedWalker(tokenizer)


def _starts(tokenizer: Tokenizer, *texts: str) -> set[int]:
    """All tokens that one of the texts can begin with."""
    return {
        token_id
        for token_id in range(tokenizer.vocab_size)
        if token_id not in tokenizer.eos_token_ids
        and (part := tokenizer.token_bytes(token_id))
        and any(text.encode().startswith(part) for text in texts)
    }


def test_the_mask_has_each_token_that_may_come_next_and_no_other(tokenizer: Tokenizer, walker: GuidedWalker) -> None:
    matcher = guidance_matcher(walker.library, 'start: "the quick" | "the name" | "été"')
    assert set(allowed_ids(matcher, walker.vocab_size)) == _starts(tokenizer, "the quick", "the name", "été")
    matcher = guidance_matcher(walker.library, r"start: /\{?/")
    assert set(allowed_ids(matcher, walker.vocab_size)) == _starts(tokenizer, "{") | tokenizer.eos_token_ids
    matcher = guidance_matcher(walker.library, r"start: /(?s:.*)/")
    allowed = allowed_ids(matcher, walker.vocab_size)
    special = tokenizer.special_tokens.keys() - tokenizer.eos_token_ids
    assert not special & set(allowed)
    assert max(allowed) < tokenizer.vocab_size
    assert tokenizer.eos_token_ids <= set(allowed)


def test_what_is_forced_is_written_in_the_models_own_tokens(tokenizer: Tokenizer, walker: GuidedWalker) -> None:
    text = '{"name": "get_weather", "arguments": {"city": "été 🙂"}}'
    ids = walker.write("start: " + json.dumps(text), seed=0)
    assert walker.text(ids) == text
    if not tokenizer.strips_leading_space:
        assert ids == tokenizer.encode(text, add_special_tokens=False)
    # SentencePiece would put a space before it, which is no part of the text.
    assert len(ids) <= len(tokenizer.encode(text, add_special_tokens=False)) + 2


def test_a_long_forced_text_comes_out_whole(walker: GuidedWalker) -> None:
    text = "the quick brown fox, été 🙂 " * 40
    assert walker.text(walker.write("start: " + json.dumps(text), seed=0)) == text


def test_special_tokens_are_allowed_where_a_grammar_names_them(tokenizer: Tokenizer, walker: GuidedWalker) -> None:
    token_id, text = next(
        (token_id, text)
        for token_id, text in tokenizer.special_tokens.items()
        if token_id not in tokenizer.eos_token_ids and text.startswith("<")
    )
    for name in (text, f"<[{token_id}]>"):
        assert walker.write(f'start: {name} "a"', seed=0)[0] == token_id
    spelled = walker.write("start: " + json.dumps(text), seed=0)
    assert token_id not in spelled
    assert walker.text(spelled) == text


def test_every_token_that_ends_a_text_ends_a_match_and_is_nowhere_else(
    tokenizer: Tokenizer, walker: GuidedWalker
) -> None:
    matcher = guidance_matcher(walker.library, 'start: "a"')
    for token_id in allowed_ids(matcher, walker.vocab_size)[:1]:
        assert matcher.consume_token(token_id)
    assert set(allowed_ids(matcher, walker.vocab_size)) == tokenizer.eos_token_ids
    matcher = guidance_matcher(walker.library, 'start: /[^z]*/ "z"')
    assert not tokenizer.eos_token_ids & set(allowed_ids(matcher, walker.vocab_size))


def test_a_model_may_have_fewer_ids_than_its_tokenizer() -> None:
    vocabulary = GuidanceVocabulary.of(ByteTokenizer(300), 257)
    assert len(vocabulary.tokens) == 257
    assert vocabulary.special_ids == (256,)
    matcher = guidance_matcher(vocabulary.library_tokenizer(), "start: /[a-c]/")
    assert allowed_ids(matcher, 257) == [97, 98, 99]


def test_a_model_that_cannot_end_a_text_is_refused() -> None:
    with pytest.raises(ModelError, match="no token that ends a text"):
        GuidanceVocabulary.of(ByteTokenizer(300), 256)


def test_a_bad_grammar_is_refused_without_being_quoted_at_length() -> None:
    tokens = GuidanceVocabulary.of(ByteTokenizer(258), 258).library_tokenizer()
    with pytest.raises(InvalidRequestError, match="unknown name"):
        guidance_matcher(tokens, "start: foo")


def test_a_lexer_that_explodes_ends_its_own_matcher() -> None:
    tokens = GuidanceVocabulary.of(ByteTokenizer(258), 258).library_tokenizer()
    matcher = guidance_matcher(tokens, "start: /((.*a.{300}b.*)+)/")
    state = 1
    for _ in range(20_000):
        matcher.compute_bitmask()
        if matcher.is_error():
            break
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        matcher.consume_token(b"ab"[state >> 16 & 1])
    assert "too many" in matcher.get_error()
