from __future__ import annotations

import json
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from shared.errors import ModelError
from shared.model.source import HfFolder, RandomModel, SyntheticModel
from shared.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from shared.text.tokenizer import Tokenizer

TEXTS = ["", "the fox", " the  fox ", "1 22\n\n333 4", "été 🙂", "<|end|>the <|pad|>", "<|begin|>x", "你好\x00\x7f"]
CORPUS = ["the quick brown fox jumps over the lazy dog", "1 22 333 4444", "été, señor"] * 3


def _byte_level(folder: Path, **config: Any) -> Path:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>", "<|pad|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    standard = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
    _write_json(folder / "tokenizer_config.json", standard | config)
    _write_json(folder / "config.json", {"model_type": "llama"})
    return folder


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def _load(folder: Path) -> Tokenizer:
    return load_tokenizer(HfFolder(folder))


def _reference(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {
            "eos_token": {"__type": "AddedToken", "content": "<|end|>", "lstrip": False},
            "additional_special_tokens": ["4"],
        },
    ],
)
def test_the_ids_are_those_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    ours, reference = _load(_byte_level(tmp_path, **config)), _reference(tmp_path)
    for text in TEXTS:
        for add in (True, False):
            expected = reference(text, add_special_tokens=add, truncation=False, padding=False)["input_ids"]
            assert ours.encode(text, add_special_tokens=add) == expected, (text, add)
            assert ours.decode(expected) == reference.decode(expected, skip_special_tokens=True)
    known = {token_id for token_id in reference.all_special_ids if token_id < ours.vocab_size}
    assert set(ours.special_tokens) == known | {2}


def test_sentencepiece_style_folder(tmp_path: Path) -> None:
    pieces = ["▁", "t", "h", "e", "▁t", "he", "▁the", "f", "o", "x"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = _load(tmp_path)
    for text in ["the fox", " the", "été 🙂", "  "]:
        token_ids = ours.encode(text)
        assert token_ids == backend.encode(text).ids
        assert ours.decode(token_ids) == backend.decode(token_ids) == text
    assert ours.eos_token_ids == frozenset()
    assert ours.chat_templates == {}


def test_all_ids_that_any_file_calls_the_end_end_a_generation(tmp_path: Path) -> None:
    folder = _byte_level(tmp_path)
    _write_json(folder / "config.json", {"eos_token_id": 7})
    _write_json(folder / "generation_config.json", {"eos_token_id": [8, 9]})
    assert _load(folder).eos_token_ids == {1, 7, 8, 9}


def test_chat_templates_may_lie_in_five_places(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}, {"name": "bad"}, 5]
    assert _load(_byte_level(tmp_path, chat_template="C")).chat_templates == {"default": "C"}
    assert _load(_byte_level(tmp_path, chat_template=named)).chat_templates == {"tool_use": "T", "default": "D"}
    _write_json(tmp_path / "chat_template.json", {"chat_template": "J"})
    assert _load(tmp_path).chat_templates == {"default": "J"}
    (tmp_path / "chat_template.jinja").write_text("X\n")
    assert _load(tmp_path).chat_templates == {"default": "X\n"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("U")
    assert _load(tmp_path).chat_templates == {"default": "X\n", "tool_use": "U"} == _reference(tmp_path).chat_template


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json is damaged"),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer.json is damaged"),
        ("tokenizer.json", b"\xff\xfe", "not UTF-8"),
        ("tokenizer_config.json", "[]", "no JSON object"),
        ("tokenizer_config.json", "[" * 100_000, "not JSON"),
        ("generation_config.json", "{'a': 1}", "not JSON"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    folder = _byte_level(tmp_path)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=message):
        _load(folder)


def test_a_missing_or_unsupported_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json; write one"):
        _load(tmp_path)
    Backend(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="decodes by nothing; supported are ByteLevel and ByteFallback"):
        _load(tmp_path)


def test_a_tokenizer_file_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 29)
    with pytest.raises(ModelError, match="larger than 256 MiB"):
        _load(tmp_path)
    shutil.rmtree(tmp_path)


def test_random_and_synthetic_models_have_byte_tokens() -> None:
    for tokenizer, size in (
        (load_tokenizer(RandomModel("tiny-llama")), 260),
        (load_tokenizer(SyntheticModel(vocab_size=1000)), 1000),
    ):
        token_ids = tokenizer.encode("é<|eos|>")
        assert token_ids == [257, 0xC3, 0xA9, 256]
        assert tokenizer.encode("é<|eos|>", add_special_tokens=False, parse_special=False) == list("é<|eos|>".encode())
        assert tokenizer.decode(token_ids) == "é"
        assert tokenizer.vocab_size == size
        assert tokenizer.eos_token_ids == {256}


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    with pytest.raises(ModelError, match="too small"):
        load_tokenizer(SyntheticModel(vocab_size=100))
