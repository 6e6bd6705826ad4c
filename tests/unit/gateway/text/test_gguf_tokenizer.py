from __future__ import annotations

import io
import json
import warnings
from typing import TYPE_CHECKING, Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import SentencePieceBPETokenizer, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.gateway.text.detokenizer import Detokenizer
from shared.errors import ModelError
from shared.model.source import GgufFile
from shared.text.spelling import BYTE_LEVEL_CHARACTERS, byte_level_bytes
from shared.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from shared.text.tokenizer import Tokenizer as OurTokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "der schnelle braune Fuchs", "1 22 333 4444", "été, señor"] * 3
TEXTS = [
    "",
    "the fox",
    " the  fox ",
    "  1 22 333\n\n4",
    "don't DON'T",
    "été 🙂",
    "<|end|>the<think>fox",
    "a\tb\r\n c",
    "你好",
]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def _write(path: Path, fields: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 64, "embedding_length": 8, "block_count": 1, "feed_forward_length": 8, "vocab_size": 300}
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", 1)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _byte_level_fields(pre: str, **more: Any) -> dict[str, Any]:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=list(BYTE_LEVEL_CHARACTERS),
        special_tokens=["<|endoftext|>", "<|end|>"],
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    tokens = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    pairs = [" ".join(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    kinds = [CONTROL if token.startswith("<|") else NORMAL for token in tokens]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<think>"],
        "tokenizer.ggml.token_type": [*kinds, USER_DEFINED],
        "tokenizer.ggml.merges": pairs,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return fields | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def _sentencepiece_fields(**more: Any) -> dict[str, Any]:
    trained = SentencePieceBPETokenizer()
    trained.train_from_iterator(CORPUS, vocab_size=120, show_progress=False)
    learnt = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    pieces = [piece for piece, _ in learnt if piece != "<unk>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return fields | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def _reference(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def _load(path: Path, **options: Any) -> OurTokenizer:
    return load_tokenizer(GgufFile(path), **options)


@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("ends", [{}, {"add_bos_token": True, "add_eos_token": True}])
def test_byte_level_ids_are_those_of_transformers(tmp_path: Path, pre: str, ends: dict[str, bool]) -> None:
    path = _write(tmp_path / "m.gguf", _byte_level_fields(pre, **ends))
    ours, reference = _load(path), _reference(path)
    for text in TEXTS:
        for add in (True, False):
            assert ours.encode(text, add_special_tokens=add) == reference.encode(text, add_special_tokens=add), text
    assert ours.special_tokens == {0: "<|endoftext|>", 1: "<|end|>"}
    assert ours.decode(ours.encode("<think>x<|end|>")) == "<think>x"


def test_llama_bpe_by_the_rules_of_llama_cpp_begins_with_the_begin_token(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", _byte_level_fields("llama-bpe"))
    assert _load(path, rules="llama.cpp").encode("the")[0] == 0
    assert _load(path).encode("the")[0] != 0


def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", _sentencepiece_fields())
    ours, reference = _load(path), _reference(path)
    for text in [*TEXTS, "<s>the</s>", "\x00\x01", "▁"]:
        assert ours.encode(text) == reference.encode(text), text
    assert ours.encode("the")[0] == 1
    assert ours.strips_leading_space
    for text in ["the fox", "été 🙂", "你好", "a  b"]:
        token_ids = ours.encode(text)
        assert ours.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True) == text


def test_sentencepiece_without_the_prefix_space(tmp_path: Path) -> None:
    ours = _load(_write(tmp_path / "m.gguf", _sentencepiece_fields(add_space_prefix=False, add_bos_token=False)))
    assert ours.decode(ours.encode(" the")) == " the"
    assert ours.decode(ours.encode("the")) == "the"


@given(data=st.data())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sentencepiece_pieces_join_to_the_decoded_text(sentencepiece: OurTokenizer, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, sentencepiece.vocab_size - 1), max_size=20))
    detokenizer = Detokenizer(sentencepiece)
    pieces = [detokenizer.push([token_id]).text for token_id in token_ids]
    assert "".join(pieces) + detokenizer.finish().text == sentencepiece.decode(token_ids)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> OurTokenizer:
    return _load(_write(tmp_path_factory.mktemp("spm") / "m.gguf", _sentencepiece_fields()))


def test_every_id_that_ends_a_turn_is_known(tmp_path: Path) -> None:
    fields = _byte_level_fields("qwen2", eot_token_id=5, eom_token_id=6)
    assert _load(_write(tmp_path / "m.gguf", fields)).eos_token_ids == {1, 5, 6}
    del fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.eom_token_id"]
    tokenizer = _load(_write(tmp_path / "eot.gguf", fields))
    assert tokenizer.eos_token_ids == {5}
    assert tokenizer.token_bytes(5) == b""


def test_chat_templates_may_have_names(tmp_path: Path) -> None:
    fields = _byte_level_fields("qwen2")
    assert _load(_write(tmp_path / "none.gguf", fields)).chat_templates == {}
    fields["tokenizer.chat_template"] = "{{ messages }}"
    assert _load(_write(tmp_path / "one.gguf", fields)).chat_templates == {"default": "{{ messages }}"}
    fields |= {"tokenizer.chat_templates": ["tool_use", "rag"], "tokenizer.chat_template.tool_use": "T"}
    assert _load(_write(tmp_path / "more.gguf", fields)).chat_templates == {
        "default": "{{ messages }}",
        "tool_use": "T",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "viking"}, "'viking'; supported are: default, gpt-2, smollm, llama-bpe, qwen2"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'; supported are gpt2 and llama"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999"),
        ({"tokenizer.ggml.merges": ["x nothere"]}, "damaged vocabulary"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "no list of str"),
        ({"tokenizer.ggml.model": "llama"}, "damaged vocabulary|no list of float"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    fields = _byte_level_fields("qwen2") | change
    if change == {"tokenizer.ggml.model": "llama"}:
        del fields["tokenizer.ggml.merges"]
    with pytest.raises(ModelError, match=message):
        _load(_write(tmp_path / "m.gguf", fields))


def test_a_file_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no vocabulary"):
        _load(_write(tmp_path / "m.gguf", {}))


@given(data=st.data())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_truncated_or_damaged_file_gives_a_model_error_or_a_tokenizer(
    small_file: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    content = io.BytesIO(small_file[: data.draw(st.integers(0, len(small_file)))])
    for position in data.draw(st.lists(st.integers(0, 3000), max_size=3)):
        content.seek(position)
        content.write(data.draw(st.binary(min_size=1, max_size=8)))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content.getvalue())
    try:
        _load(path).encode("the fox")
    except ModelError as error:
        assert str(path) in str(error)  # noqa: PT017 - a tokenizer is the other right outcome


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _write(tmp_path_factory.mktemp("small") / "m.gguf", _byte_level_fields("qwen2")).read_bytes()


def test_the_byte_table_is_the_librarys() -> None:
    assert set(BYTE_LEVEL_CHARACTERS) == set(pre_tokenizers.ByteLevel.alphabet())
    decode = decoders.ByteLevel().decode
    for byte in range(0x80):
        assert (
            byte_level_bytes(BYTE_LEVEL_CHARACTERS[byte])
            == bytes([byte])
            == decode([BYTE_LEVEL_CHARACTERS[byte]]).encode()
        )
    assert byte_level_bytes("two words") == b"two words"
