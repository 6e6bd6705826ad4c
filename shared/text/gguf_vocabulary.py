r"""The tokenizer inside a GGUF file, built for the `tokenizers` library.

Knows what the ``tokenizer.*`` keys mean. GGUF names the rule that splits text before the merges, but does not carry it
(``tokenizer.ggml.pre``); transformers and llama.cpp, which both read such files, differ in a few of them:

- ``transformers`` (the default here): the ids that transformers gives for the same file. For ``smollm`` it uses GPT-2's
  split, for ``llama-bpe`` it adds no begin token unless the file says so.
- ``llama.cpp``: the ids that llama.cpp gives, which are those of the models' own tokenizer files. For ``smollm`` every
  digit is split off by itself, so that ``\n\n1`` is two tokens, ``\n\n`` and ``1``, and not three; for ``llama-bpe``
  words of the vocabulary win over merges, and a begin token is added unless the file says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, models, pre_tokenizers, processors

from shared.errors import ModelError
from shared.model.gguf_metadata import read_gguf_header
from shared.text.spelling import byte_fallback_bytes, byte_level_bytes
from shared.text.subword import SpecialTokens, SubwordTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shared.model.gguf_metadata import GgufHeader

__all__ = ["TextRules", "load_gguf_tokenizer"]

TextRules = Literal["transformers", "llama.cpp"]
"""Whose reading of a GGUF vocabulary is followed where the two differ."""

_CONTROL, _USER_DEFINED = 3, 4
"""Values of ``tokenizer.ggml.token_type``."""
_MAX_TOKEN_CHARACTERS = 1024
"""Of a SentencePiece token; every split of it is tried."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2_split(_: TextRules) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split(rules: TextRules) -> pre_tokenizers.PreTokenizer:
    if rules == "transformers":
        return _gpt2_split(rules)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split(rules)])


def _regex_split(pattern: str) -> Callable[[TextRules], pre_tokenizers.PreTokenizer]:
    def split(_: TextRules) -> pre_tokenizers.PreTokenizer:
        by_pattern = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([by_pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return split


_SPLITS: dict[str, Callable[[TextRules], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2_split,
    "gpt-2": _gpt2_split,
    "smollm": _smollm_split,
    "llama-bpe": _regex_split(_LLAMA3_SPLIT),
    "qwen2": _regex_split(_QWEN2_SPLIT),
}
"""The values of ``tokenizer.ggml.pre`` that are supported."""

_T = TypeVar("_T")


def load_gguf_tokenizer(path: Path, *, rules: TextRules = "transformers") -> SubwordTokenizer:
    """The tokenizer of the GGUF file at ``path`` (0.3 s for a vocabulary of 50,000).

    Raises:
        ModelError: the file is damaged, has no vocabulary, or one of a kind that is not supported.
    """
    header = read_gguf_header(path)
    tokens = _list(header, "tokenizer.ggml.tokens", str)
    if not tokens:
        raise ModelError(f"{path} has no vocabulary (tokenizer.ggml.tokens): convert the model anew.")
    kind = header.get("tokenizer.ggml.model", str, "")
    if kind not in {"gpt2", "llama"}:
        raise ModelError(f"{path} has a vocabulary of the kind {kind!r}; supported are gpt2 and llama.")
    byte_level = kind == "gpt2"
    special = _special_tokens(header, tokens)
    try:
        backend = _byte_level(header, tokens, rules) if byte_level else _sentencepiece(header, tokens)
        _add_special_tokens(backend, header, tokens)
        _add_begin_and_end(backend, header, special, begin_by_default=_begins_by_default(header, rules))
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception for a vocabulary that does not fit together
        raise ModelError(f"{path} has a damaged vocabulary ({error}): fetch the model again.") from error
    return SubwordTokenizer(
        backend,
        special,
        spelling=byte_level_bytes if byte_level else byte_fallback_bytes,
        strips_leading_space=not byte_level and _adds_space_prefix(header),
    )


def _byte_level(header: GgufHeader, tokens: list[str], rules: TextRules) -> tokenizers.Tokenizer:
    name = header.get("tokenizer.ggml.pre", str, "default")
    if name not in _SPLITS:
        raise ModelError(f"{header.path} splits text by the rule {name!r}; supported are: {', '.join(_SPLITS)}.")
    merges = [_pair(merge) for merge in _list(header, "tokenizer.ggml.merges", str)]
    words_first = name == "llama-bpe" and rules == "llama.cpp"
    backend = tokenizers.Tokenizer(models.BPE(_ids_by_token(tokens), merges, ignore_merges=words_first))
    backend.pre_tokenizer = _SPLITS[name](rules)
    return backend


def _sentencepiece(header: GgufHeader, tokens: list[str]) -> tokenizers.Tokenizer:
    vocabulary = _ids_by_token(tokens)
    given = _list(header, "tokenizer.ggml.merges", str)
    merges = [_pair(merge) for merge in given] if given else _merges_by_score(header, tokens, vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True))
    prefix: Literal["first", "never"] = "first" if _adds_space_prefix(header) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prefix, split=False)
    return backend


def _merges_by_score(header: GgufHeader, tokens: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose joined token scores best; as merges: every split of each token, best first."""
    scores = _list(header, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens) or max(map(len, tokens)) > _MAX_TOKEN_CHARACTERS:
        raise ModelError(f"{header.path} has a damaged vocabulary (tokens or scores): fetch the model again.")
    merges = []
    for token, token_id in vocabulary.items():
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(scores[token_id], len(left), len(right), (left, right)) for left, right in known]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [merge[3] for merge in merges]


def _special_tokens(header: GgufHeader, tokens: list[str]) -> SpecialTokens:
    end_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    end_ids = [token_id for key in end_keys if (token_id := _token_id(header, key, tokens)) is not None]
    bos_id, eos_id = _token_id(header, "bos_token_id", tokens), _token_id(header, "eos_token_id", tokens)
    return SpecialTokens(
        bos_token=None if bos_id is None else tokens[bos_id],
        eos_token=None if eos_id is None else tokens[eos_id],
        eos_token_ids=frozenset(end_ids),
        chat_templates=_chat_templates(header),
    )


def _chat_templates(header: GgufHeader) -> dict[str, str]:
    """The template, and more by name where the file lists names (``tokenizer.chat_template.<name>``)."""
    key = "tokenizer.chat_template"
    templates = {name: header.get(f"{key}.{name}", str, "") for name in _list(header, f"{key}s", str)}
    templates["default"] = header.get(key, str, "")
    return {name: template for name, template in templates.items() if template}


def _add_special_tokens(backend: tokenizers.Tokenizer, header: GgufHeader, tokens: list[str]) -> None:
    kinds = _list(header, "tokenizer.ggml.token_type", int)
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    named_keys = (
        "bos_token_id",
        "eos_token_id",
        "unknown_token_id",
        "padding_token_id",
        "eot_token_id",
        "eom_token_id",
    )
    named = [tokens[token_id] for key in named_keys if (token_id := _token_id(header, key, tokens)) is not None]
    user_defined = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in [*control, *named]])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in user_defined])


def _add_begin_and_end(
    backend: tokenizers.Tokenizer, header: GgufHeader, special: SpecialTokens, *, begin_by_default: bool
) -> None:
    begin = special.bos_token if header.get("tokenizer.ggml.add_bos_token", bool, begin_by_default) else None
    end = special.eos_token if header.get("tokenizer.ggml.add_eos_token", bool, False) else None
    used = [token for token in (begin, end) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=[*([begin] if begin else []), "$A", *([end] if end else [])],
        special_tokens=[(token, backend.token_to_id(token)) for token in used],
    )


def _begins_by_default(header: GgufHeader, rules: TextRules) -> bool:
    if header.get("tokenizer.ggml.model", str) == "llama":
        return True
    return rules == "llama.cpp" and header.get("tokenizer.ggml.pre", str, "default") == "llama-bpe"


def _adds_space_prefix(header: GgufHeader) -> bool:
    return header.get("tokenizer.ggml.add_space_prefix", bool, True)


def _ids_by_token(tokens: list[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _token_id(header: GgufHeader, key: str, tokens: list[str]) -> int | None:
    token_id = header.fields.get(f"tokenizer.ggml.{key}")
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise ModelError(f"{header.path}: {key} is {token_id}, of {len(tokens)} tokens: fetch the model again.")
    return token_id


def _list(header: GgufHeader, key: str, kind: type[_T]) -> list[_T]:
    """The list under ``key``, empty when it is absent."""
    values = header.get(key, list, [])
    if values and not all(isinstance(value, kind) for value in values):
        raise ModelError(f"{header.path}: {key} is no list of {kind.__name__}: fetch the model again.")
    return values
