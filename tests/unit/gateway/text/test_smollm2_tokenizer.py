from __future__ import annotations

import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from shared.errors import InvalidRequestError
from shared.model.source import GgufFile
from shared.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from shared.text.tokenizer import Tokenizer

CODE = [
    "def f(x):\n    return x ** 2\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}",
    "    1,\n        22,\n\t333",
    "SELECT * FROM t WHERE a = 'it''s';",
    '#!/bin/sh\nset -euo pipefail\r\necho "$1"',
    '{"a": [1, 2.5e-3, null], "b": "\\u00e9"}',
    "<html><body class='x'>&nbsp;</body></html>",
    "x = lambda y: y+1  # comment\n\n\n1. item\n2. item",
]
SCRIPTS = [
    "Hello, world!",
    "naïve café Ångström ½ ¼ x² ①",
    "Пусть всегда будет солнце",
    "你好，世界。今天天气很好",  # noqa: RUF001 - as it is written
    "こんにちは世界カタカナ",
    "안녕하세요 세계",
    "مرحبا بالعالم ١٢٣",
    "שלום עולם",
    "नमस्ते दुनिया १२३",
    "สวัสดีชาวโลก",
    "e\u0301 vs \u00e9, \ufb01 ligature, \u1e9b\u0323",
]
EMOJI = ["🙂", "👩‍👩‍👧‍👦 family", "🏳️‍🌈🇨🇦", "👍🏽 ok", "a🙂b🙃c", "\U0001f9ff\U0001faf6"]
SPACES = [
    " ",
    "  ",
    "   lead",
    "trail   ",
    "\t\ttabs",
    "a  1",
    "\n\n1",
    " \n \n ",
    "\u00a0nbsp\u3000wide\u2003em",
    "a\r\nb",
]
CONTROL = [
    "\x00",
    "\x00\x01\x02",
    "\x1b[31mred\x1b[0m",
    "\x7f\x80\x9f",
    "\u200b\u200d\ufeff",
    "\ufffd",
    "\ufffe\uffff",
    "\U0010ffff",
]
SPECIAL = [
    "<|im_start|>",
    "<|im_end|> after",
    "before <|endoftext|>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    " <|im_start|> <|im_end|> ",
    "<|im_start|",
    "<|IM_START|>",
    "<repo_name>x<file_sep>y<jupyter_code>z",
]


def _texts() -> list[str]:
    fixed = ["", *CODE, *SCRIPTS, *EMOJI, *SPACES, *CONTROL, *SPECIAL]
    choose = random.Random(0)
    mixed = ["".join(choose.choices(fixed, k=choose.randint(2, 5))) for _ in range(150)]
    ranges = [(0, 0x20), (0x20, 0x7F), (0x80, 0x800), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF)]
    noise = ["".join(chr(choose.randrange(*choose.choice(ranges))) for _ in range(30)) for _ in range(50)]
    return [*fixed, *mixed, *noise]


TEXTS = _texts()
ABSENT_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}
"""Bytes that SmolLM2's vocabulary does not have: transformers and we drop them."""
PLAIN_TEXTS = [
    text
    for text in TEXTS
    if not any(marker in text for marker in ("<|", "<repo", "<file", "<jup")) and not ABSENT_BYTES & set(text.encode())
]


def test_the_ids_are_those_of_transformers(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    assert len(set(TEXTS)) >= 200
    for text in TEXTS:
        assert smollm2.encode(text) == smollm2_reference.encode(text), text


@pytest.mark.parametrize("parse_special", [True, False])
def test_plain_text_comes_back(smollm2: Tokenizer, parse_special: bool) -> None:
    assert len(PLAIN_TEXTS) >= 100
    for text in PLAIN_TEXTS:
        assert smollm2.decode(smollm2.encode(text, parse_special=parse_special)) == text


def test_bytes_that_the_vocabulary_has_not_are_dropped(smollm2: Tokenizer) -> None:
    pieces = {smollm2.token_bytes(token_id) for token_id in range(smollm2.vocab_size)}
    assert {byte for byte in range(256) if bytes([byte]) not in pieces} == ABSENT_BYTES
    assert smollm2.encode("a\x04b") == [*smollm2.encode("a"), *smollm2.encode("b")]


def test_special_tokens_as_plain_text_come_back_and_forge_no_turn(smollm2: Tokenizer) -> None:
    for text in SPECIAL:
        token_ids = smollm2.encode(text, parse_special=False)
        assert smollm2.decode(token_ids) == text
        assert not smollm2.special_tokens.keys() & set(token_ids)
    assert smollm2.encode("<|im_start|>") == [1]  # and the option does not stick


def test_decoding_agrees_with_transformers_for_any_ids(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    choose = random.Random(1)
    for _ in range(300):
        token_ids = [choose.randrange(choose.choice([300, smollm2.vocab_size])) for _ in range(12)]
        assert smollm2.decode(token_ids) == smollm2_reference.decode(token_ids, skip_special_tokens=True)


def test_the_vocabulary(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    assert smollm2.vocab_size == len(smollm2_reference) == 49152
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.eos_token_ids == {2}
    assert smollm2.special_tokens.keys() == set(range(17))
    assert smollm2.chat_templates == {"default": smollm2_reference.chat_template}
    assert smollm2.token_bytes(2) == b""
    assert smollm2.token_bytes(smollm2.vocab_size) == b""
    assert smollm2.token_bytes(-1) == b""
    assert not smollm2.strips_leading_space


def test_rules_of_llama_cpp_split_digits_off_as_the_published_tokenizer_does(
    smollm2_path: Path, smollm2_reference: Any
) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import pre_tokenizers

    published = Backend.from_str(smollm2_reference.backend_tokenizer.to_str())
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer = load_tokenizer(GgufFile(smollm2_path), rules="llama.cpp")
    for text in TEXTS:
        assert tokenizer.encode(text) == published.encode(text).ids, text
    assert len(tokenizer.encode("\n\n1")) == 2
    # The vocabulary shows that it was trained so: no token joins an ASCII digit with anything.
    pieces = [tokenizer.token_bytes(token_id).decode("latin-1") for token_id in range(tokenizer.vocab_size)]
    assert {piece for piece in pieces if any(digit in piece for digit in "0123456789")} == set("0123456789")


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_a_lone_surrogate_is_refused(smollm2: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        smollm2.encode(text)


def test_text_handling_imports_neither_torch_nor_transformers() -> None:
    modules = "shared.text.tokenizer", "services.gateway.text.detokenizer", "services.gateway.text.chat_template"
    program = "import sys\n" + "".join(f"import {name}\n" for name in modules)
    program += (
        "import shared.model.store\nprint(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
