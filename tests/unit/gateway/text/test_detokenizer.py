from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.text.detokenizer import Detokenizer
from shared.text.byte_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from shared.text.tokenizer import Tokenizer

BYTES = ByteTokenizer(260)
UNHURRIED = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _chunks(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    chunks, position = [], 0
    for size in sizes:
        chunks.append(token_ids[position : position + size])
        position += size
    return [*chunks, token_ids[position:]]


@given(token_ids=st.lists(st.integers(0, 300) | st.integers(0, 49151), max_size=40), sizes=st.lists(st.integers(0, 5)))
@UNHURRIED
def test_pieces_join_to_the_decoded_text(
    smollm2: Tokenizer, smollm2_reference: Any, token_ids: list[int], sizes: list[int]
) -> None:
    detokenizer = Detokenizer(smollm2)
    pieces = [detokenizer.push(chunk) for chunk in _chunks(token_ids, sizes)]
    pieces.append(detokenizer.finish())
    text = smollm2.decode(token_ids)
    assert "".join(pieces) == text
    assert text == smollm2_reference.decode(token_ids, skip_special_tokens=True)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.finish() == ""


@given(text=st.text(max_size=40))
@UNHURRIED
def test_only_whole_characters_are_given_out(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    shown = ""
    for token_id in BYTES.encode(text, add_special_tokens=False, parse_special=False):
        shown += detokenizer.push([token_id])
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.finish() == ""


@given(data=st.binary(max_size=40))
@UNHURRIED
def test_at_most_three_bytes_are_ever_held_back(data: bytes) -> None:
    detokenizer = Detokenizer(BYTES)
    shown = ""
    for count, byte in enumerate(data, 1):
        shown += detokenizer.push([byte])
        whole = data[:count].decode(errors="replace")
        assert whole.startswith(shown)
        # One U+FFFD, or two for the beginning of a surrogate, which Python's decoder keeps until the third byte.
        assert whole.removeprefix(shown) in {"", "\ufffd", "\ufffd\ufffd"}
    assert shown + detokenizer.finish() == data.decode(errors="replace")


def test_an_impossible_byte_is_shown_at_once_and_a_possible_beginning_is_not() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([0xE2, 0x82]) == ""
    assert detokenizer.push([0xAC]) == "€"
    assert detokenizer.push([0xFF]) == "\ufffd"
    assert detokenizer.push([0xF0, 0x9F]) == ""
    assert detokenizer.push([ord("a")]) == "\ufffda"
    assert detokenizer.push([0xC3]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_special_tokens_add_nothing_even_inside_a_character() -> None:
    (eos,) = BYTES.eos_token_ids
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([0xC3, eos, 0xA9, eos]) == "é"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(("token_id", "text"), [(258, "y"), (259, "z"), (256, ""), (257, ""), (260, ""), (-1, "")])
def test_ids_of_random_models_beyond_the_bytes_show_as_letters(token_id: int, text: str) -> None:
    assert BYTES.decode([token_id]) == text
