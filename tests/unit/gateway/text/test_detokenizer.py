from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.text.detokenizer import Detokenizer, Piece
from services.gateway.text.stop_strings import StopStrings
from shared.text.byte_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.text.tokenizer import Tokenizer

BYTES = ByteTokenizer(260)
UNHURRIED = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])

WORDS = [
    *(b"", b" ", b"  ", b" a", b"a", b"b", b"ab", b"!", b"!!", b"\n"),
    *("é".encode(), b"\xc3", b"\xa9", b"\xa9b", "字".encode(), b"\xe5\xad", b"\x97", b" \xe5", b"\xad\x97a"),
    *("👩".encode(), b"\xf0\x9f", b"\x91\xa9", "\u200d".encode(), "🚀".encode(), b"\xf0", b"\x9f\x9a\x80"),
    *("e\u0301".encode(), b"\xcc", b"\x81", b"\xff", b"\xed\xa0", b"\xe0\x80", "\ufffd".encode()),
]
TOKENS = st.lists(st.integers(0, len(WORDS) - 1), max_size=30)
STOPS = st.lists(st.text("ab! é字👩\u200d🚀\u0301", min_size=1, max_size=4), max_size=3)


class WordTokenizer(ByteTokenizer):
    """A small vocabulary of what is awkward."""

    def __init__(self, *, strips_leading_space: bool) -> None:
        super().__init__(300)
        self.strips_leading_space = strips_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        return WORDS[token_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        text = super().decode(token_ids)
        return text.removeprefix(" ") if self.strips_leading_space else text


def chunks(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    found, position = [], 0
    for size in sizes:
        found.append(token_ids[position : position + size])
        position += size
    return [*found, token_ids[position:]]


def run(detokenizer: Detokenizer, token_ids: list[int], sizes: list[int]) -> list[Piece]:
    pieces = []
    for chunk in chunks(token_ids, sizes):
        pieces.append(detokenizer.push(chunk))
        if detokenizer.stop is not None:
            assert detokenizer.push([1]) == detokenizer.finish() == Piece("", [], [])
            return pieces
    return [*pieces, detokenizer.finish()]


def joined(pieces: list[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        [token_id for piece in pieces for token_id in piece.token_ids],
        [part for piece in pieces for part in piece.token_bytes],
    )


def text_of(piece: Piece) -> str:
    return b"".join(piece.token_bytes).decode(errors="replace")


@given(token_ids=st.lists(st.integers(0, 300) | st.integers(0, 49151), max_size=40), sizes=st.lists(st.integers(0, 5)))
@UNHURRIED
def test_pieces_join_to_the_decoded_text(
    smollm2: Tokenizer, smollm2_reference: Any, token_ids: list[int], sizes: list[int]
) -> None:
    detokenizer = Detokenizer(smollm2)
    pieces = run(detokenizer, token_ids, sizes)
    text = smollm2.decode(token_ids)
    whole = joined(pieces)
    assert whole.text == text == text_of(whole)
    assert whole.token_ids == token_ids
    assert text == smollm2_reference.decode(token_ids, skip_special_tokens=True)
    assert "\ufffd" in text or not any("\ufffd" in piece.text for piece in pieces)
    assert detokenizer.finish() == Piece("", [], [])


@given(TOKENS, st.lists(st.integers(0, 5)), STOPS, st.booleans(), st.integers(0, 8))
@UNHURRIED
def test_however_tokens_come_the_output_is_the_same(
    token_ids: list[int], sizes: list[int], stops: list[str], strips: bool, min_tokens: int
) -> None:
    tokenizer = WordTokenizer(strips_leading_space=strips)
    stop_strings = StopStrings(stops)
    detokenizer = Detokenizer(tokenizer, stop_strings, min_tokens=min_tokens)
    pieces = run(detokenizer, token_ids, sizes)
    at_once = Detokenizer(tokenizer, stop_strings, min_tokens=min_tokens)
    assert joined(run(at_once, token_ids, [])) == joined(pieces)
    assert at_once.stop == detokenizer.stop

    whole = joined(pieces)
    full = tokenizer.decode(token_ids)
    assert text_of(whole) == whole.text
    assert whole.token_ids == token_ids[: len(whole.token_ids)]
    if detokenizer.stop is None:
        assert (whole.text, whole.token_ids) == (full, token_ids)
    else:
        assert full.startswith(whole.text + detokenizer.stop)
        shown = tokenizer.decode(whole.token_ids)
        assert shown.startswith(whole.text + detokenizer.stop), "the tokens of the stop string are there, too"
        assert not tokenizer.decode(whole.token_ids[:-1]).startswith(whole.text + detokenizer.stop)
        assert len(whole.token_ids) >= min_tokens
    for size in range(len(token_ids) + 1):
        early = any(stop in tokenizer.decode(token_ids[:size]) for stop in stops)
        if (
            early
            and size >= max(min_tokens, 1)
            and not any(stop in tokenizer.decode(token_ids[: size - 1]) for stop in stops)
        ):
            assert detokenizer.stop is not None
            assert len(whole.token_ids) == size
            break
        if early:
            break


@given(text=st.text(max_size=40))
@UNHURRIED
def test_only_whole_characters_are_given_out_with_their_last_token(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    shown = ""
    for token_id in BYTES.encode(text, add_special_tokens=False, parse_special=False):
        piece = detokenizer.push([token_id])
        shown += piece.text
        assert text.startswith(shown)
        assert BYTES.decode(piece.token_ids) == piece.text
    assert shown == text
    assert detokenizer.finish() == Piece("", [], [])


@given(data=st.binary(max_size=40))
@UNHURRIED
def test_at_most_three_bytes_are_ever_held_back(data: bytes) -> None:
    detokenizer = Detokenizer(BYTES)
    shown = ""
    for count, byte in enumerate(data, 1):
        shown += detokenizer.push([byte]).text
        whole = data[:count].decode(errors="replace")
        assert whole.startswith(shown)
        # One U+FFFD, or two for the beginning of a surrogate, which Python's decoder keeps until the third byte.
        assert whole.removeprefix(shown) in {"", "\ufffd", "\ufffd\ufffd"}
    assert shown + detokenizer.finish().text == data.decode(errors="replace")


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
@UNHURRIED
def test_no_more_is_held_back_than_may_still_become_a_stop_string(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(BYTES, StopStrings(stops))
    shown = ""
    for count, character in enumerate(text, 1):
        shown += detokenizer.push([ord(character)]).text
        if detokenizer.stop is not None:
            assert text[:count] == shown + detokenizer.stop
            return
        held = text[:count].removeprefix(shown)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert shown + detokenizer.finish().text == text


def test_an_impossible_byte_is_shown_at_once_and_a_possible_beginning_is_not() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([0xE2, 0x82]) == Piece("", [], [])
    assert detokenizer.push([0xAC]) == Piece("€", [0xE2, 0x82, 0xAC], [b"\xe2", b"\x82", b"\xac"])
    assert detokenizer.push([0xFF]).text == "\ufffd"
    assert detokenizer.push([0xF0, 0x9F]) == Piece("", [], [])
    assert detokenizer.push([ord("a")]) == Piece("\ufffda", [0xF0, 0x9F, ord("a")], [b"\xf0", b"\x9f", b"a"])
    assert detokenizer.push([0xC3]) == Piece("", [], [])
    assert detokenizer.finish() == Piece("\ufffd", [0xC3], [b"\xc3"])
    assert detokenizer.finish() == Piece("", [], [])


def test_a_token_goes_out_with_its_last_byte() -> None:
    tokenizer = WordTokenizer(strips_leading_space=False)
    space_and_begin, rest = WORDS.index(b" \xe5"), WORDS.index(b"\xad\x97a")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([space_and_begin]) == Piece(" ", [], [])
    assert detokenizer.push([rest]) == Piece("字a", [space_and_begin, rest], [b" \xe5", b"\xad\x97a"])


def test_special_tokens_add_nothing_even_inside_a_character() -> None:
    (eos,) = BYTES.eos_token_ids
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([eos]) == Piece("", [eos], [b""])
    assert detokenizer.push([0xC3, eos, 0xA9, eos]).text == "é"
    assert detokenizer.finish() == Piece("", [], [])


def test_a_stop_string_cuts_tokens() -> None:
    tokenizer = WordTokenizer(strips_leading_space=False)
    a_b, bang, mark = WORDS.index(b"ab"), WORDS.index(b"!!"), WORDS.index(b"!")
    detokenizer = Detokenizer(tokenizer, StopStrings(["b!"]))
    assert detokenizer.push([mark]) == Piece("!", [mark], [b"!"])
    assert detokenizer.push([a_b]) == Piece("a", [], [])
    assert detokenizer.push([bang, mark]) == Piece("", [a_b, bang], [b"a", b""])
    assert detokenizer.stop == "b!"


def test_a_leading_space_is_the_vocabularys_only_at_the_beginning() -> None:
    tokenizer = WordTokenizer(strips_leading_space=True)
    space_a = WORDS.index(b" a")
    assert Detokenizer(tokenizer).push([0, space_a, space_a]) == Piece("a a", [0, space_a, space_a], [b"", b"a", b" a"])
    assert Detokenizer(tokenizer, continues=True).push([space_a]).text == " a"
    stopped = Detokenizer(tokenizer, StopStrings([" a"]))
    assert stopped.push([space_a]).text == "a", "what is not shown does not stop"
    assert stopped.push([space_a]) == Piece("", [space_a], [b""])


@pytest.mark.parametrize(("token_id", "text"), [(258, "y"), (259, "z"), (256, ""), (257, ""), (260, ""), (-1, "")])
def test_ids_of_random_models_beyond_the_bytes_show_as_letters(token_id: int, text: str) -> None:
    assert BYTES.decode([token_id]) == text
