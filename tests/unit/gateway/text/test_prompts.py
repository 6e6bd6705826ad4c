"""Exactly one begin token, whoever spells it (scenario 27)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.prompts import encode_conversation, encode_text
from shared.generation import ChatMessage
from shared.model.source import GgufFile, HfFolder
from shared.text.byte_tokenizer import ByteTokenizer
from shared.text.spelling import BYTE_LEVEL_CHARACTERS
from shared.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from shared.text.tokenizer import Tokenizer

TOKENS = [*BYTE_LEVEL_CHARACTERS, "<s>", "</s>"]
BOS, EOS = 256, 257


def _folder(folder: Path, *, begins: bool) -> Tokenizer:
    backend = Backend(models.BPE({token: index for index, token in enumerate(TOKENS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if begins:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return load_tokenizer(HfFolder(folder))


def _gguf(folder: Path, *, begins: bool) -> Tokenizer:
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", TOKENS)
    writer.add_array("tokenizer.ggml.token_type", [1] * 256 + [3] * 2)
    writer.add_uint32("tokenizer.ggml.bos_token_id", BOS)
    writer.add_uint32("tokenizer.ggml.eos_token_id", EOS)
    writer.add_bool("tokenizer.ggml.add_bos_token", begins)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(GgufFile(folder / "m.gguf"))


@pytest.mark.parametrize("load", [_folder, _gguf])
@pytest.mark.parametrize(
    ("template", "text"), [("{{ bos_token }}{{ messages[0].content }}", "<s>hi"), ("{{ messages[0].content }}", "hi")]
)
def test_a_conversation_begins_once(tmp_path: Path, load: object, template: str, text: str) -> None:
    assert callable(load)
    tokenizer: Tokenizer = load(tmp_path, begins=True)
    prompt = ChatTemplate(template, bos_token=tokenizer.bos_token).render([ChatMessage("user", "hi")])
    assert prompt == text
    assert encode_conversation(tokenizer, prompt) == [BOS, *tokenizer.encode("hi", add_special_tokens=False)]


@pytest.mark.parametrize("load", [_folder, _gguf])
def test_a_text_begins_once(tmp_path: Path, load: object) -> None:
    assert callable(load)
    tokenizer: Tokenizer = load(tmp_path, begins=True)
    hi = tokenizer.encode("hi", add_special_tokens=False)
    assert encode_text(tokenizer, "hi") == encode_text(tokenizer, "<s>hi") == [BOS, *hi]
    assert encode_text(tokenizer, "") == encode_text(tokenizer, "<s>") == [BOS]
    assert encode_text(tokenizer, "hi<s>hi") == [BOS, *hi, BOS, *hi]
    assert encode_text(tokenizer, "aa") == [BOS, *[tokenizer.encode("a")[1]] * 2]
    assert encode_text(tokenizer, "<s><s>hi", add_special_tokens=False) == [BOS, BOS, *hi]


@pytest.mark.parametrize("load", [_folder, _gguf])
def test_a_model_without_begin_token_gets_none(tmp_path: Path, load: object) -> None:
    assert callable(load)
    tokenizer: Tokenizer = load(tmp_path, begins=False)
    hi = tokenizer.encode("hi", add_special_tokens=False)
    assert encode_text(tokenizer, "hi") == encode_conversation(tokenizer, "hi") == hi
    assert encode_text(tokenizer, "<s>hi") == encode_conversation(tokenizer, "<s>hi") == [BOS, *hi]
    assert encode_text(tokenizer, "") == encode_conversation(tokenizer, "") == []
    assert encode_text(tokenizer, "aa") == encode_text(tokenizer, "a") * 2


def test_byte_models_begin_their_conversations() -> None:
    tokenizer = ByteTokenizer(258)
    assert encode_conversation(tokenizer, "hi") == encode_text(tokenizer, "hi") == [257, *b"hi"]
