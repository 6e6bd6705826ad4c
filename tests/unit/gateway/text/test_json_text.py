"""How deep JSON may be nested."""

from __future__ import annotations

import json

import pytest

from services.gateway.text.json_text import MAX_JSON_DEPTH, parse_json


@pytest.mark.parametrize("depth", [1, 2, MAX_JSON_DEPTH - 1, MAX_JSON_DEPTH])
def test_that_what_is_within_the_limit_can_be_written_again(depth: int) -> None:
    text = "[" * depth + "]" * depth

    assert json.dumps(parse_json(text)) == text


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 900, 990, 1000, 5000, 100_000])
def test_that_what_is_deeper_is_refused(depth: int) -> None:
    for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        with pytest.raises(ValueError, match="nested more than 256 levels deep"):
            parse_json(text)


def test_that_width_is_no_depth() -> None:
    assert len(parse_json(json.dumps([[1], {"a": 2}] * 50_000))) == 100_000
