"""Small tokenizers of all kinds that are served, trained on the spot, with tokens that cross the borders of JSON's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import gguf
from tokenizers import AddedToken, SentencePieceBPETokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from shared.model.source import GgufFile, HfFolder
from shared.text.byte_tokenizer import ByteTokenizer
from shared.text.spelling import BYTE_LEVEL_CHARACTERS
from shared.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from shared.text.tokenizer import Tokenizer

__all__ = ["KINDS", "load_vocabulary"]

KINDS = ("bytes", "byte level", "byte level gguf", "sentencepiece", "sentencepiece gguf")

_CORPUS = [
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
    '[{"a": 1}, {"b": [true, false, null]}]',
    "the quick brown fox, été 🙂 \n\n  and so on: 12:30, 3.14",
] * 3
_SPECIAL = ("<s>", "</s>", "[TOOL_CALLS]", "<|python_tag|>")
_END_OF_TURN = "<|end|>"
"""Ends a text, but is an ordinary token to the tokenizer."""


def load_vocabulary(kind: str, folder: Path) -> Tokenizer:
    """The tokenizer of one of the ``KINDS``; ``folder`` is for its files."""
    if kind == "bytes":
        return ByteTokenizer(300)
    if kind == "byte level":
        return _byte_level_folder(folder)
    if kind == "byte level gguf":
        backend = _byte_level_backend()
        tokens = _tokens_of(backend)
        return _gguf(folder / "m.gguf", "gpt2", tokens, merges=_merges_of(backend))
    pieces = _pieces()
    if kind == "sentencepiece":
        return _sentencepiece_folder(folder, pieces)
    tokens = ["<unk>", *_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return _gguf(folder / "m.gguf", "llama", tokens, scores=[-float(index) for index in range(len(tokens))])


def _byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=list(BYTE_LEVEL_CHARACTERS), special_tokens=[*_SPECIAL], show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _byte_level_folder(folder: Path) -> Tokenizer:
    backend = _byte_level_backend()
    backend.add_tokens([AddedToken(text, special=False) for text in (_END_OF_TURN, "<tool_call>", "</tool_call>")])
    _save(backend, folder)
    return load_tokenizer(HfFolder(folder))


def _pieces() -> list[str]:
    trained = SentencePieceBPETokenizer()
    trained.train_from_iterator(_CORPUS, vocab_size=150, show_progress=False)
    learnt = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    return [piece for piece, _ in learnt if piece != "<unk>"]


def _sentencepiece_folder(folder: Path, pieces: list[str]) -> Tokenizer:
    tokens = ["<unk>", *_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", *_SPECIAL])
    _save(backend, folder)
    return load_tokenizer(HfFolder(folder))


def _save(backend: Backend, folder: Path) -> None:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    ends = [token_id for token in ("</s>", _END_OF_TURN) if (token_id := backend.token_to_id(token)) is not None]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def _tokens_of(backend: Backend) -> list[str]:
    vocabulary = backend.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def _merges_of(backend: Backend) -> list[str]:
    return [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]


def _gguf(
    path: Path, model: str, tokens: list[str], *, merges: list[str] | None = None, scores: list[float] | None = None
) -> Tokenizer:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", model)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    control = 3
    writer.add_array("tokenizer.ggml.token_type", [control if token in _SPECIAL else 1 for token in tokens])
    if merges is not None:
        writer.add_array("tokenizer.ggml.merges", merges)
    if scores is not None:
        writer.add_array("tokenizer.ggml.scores", scores)
    for name, token in (("bos", "<s>"), ("eos", "</s>")):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", tokens.index(token))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(GgufFile(path))
