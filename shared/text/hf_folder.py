"""The tokenizer of a folder in Hugging Face layout.

Knows ``tokenizer.json``, ``tokenizer_config.json``, ``generation_config.json``, ``config.json`` and the places where a
chat template may lie. What stands around an encoded text is what tokenizer.json says, as in transformers, which ignores
``add_bos_token`` in the configuration when there is a tokenizer.json. No code of the folder is ever run.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken

from shared.errors import ModelError
from shared.text.spelling import byte_fallback_bytes, byte_level_bytes
from shared.text.subword import SpecialTokens, SubwordTokenizer

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["load_hf_tokenizer"]

_Json = dict[str, Any]

_MAX_TOKENIZER_BYTES = 1 << 28
_MAX_CONFIG_BYTES = 1 << 24
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_hf_tokenizer(folder: Path) -> SubwordTokenizer:
    """The tokenizer of the model in ``folder``.

    Raises:
        ModelError: a file is missing, too large, damaged, or describes a kind of tokenizer that is not supported.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json; write one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )
    text = _read(path, _MAX_TOKENIZER_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
        decoder = json.loads(text)["decoder"]
    except Exception as error:  # the library raises plain Exception for what it cannot read
        raise ModelError(f"{path} is damaged or of an unknown kind ({error}): fetch the model again.") from error
    config = _read_json(folder / "tokenizer_config.json")
    backend.no_truncation()
    backend.no_padding()
    _add_named_tokens(backend, config)
    bos_token, eos_token = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    special = SpecialTokens(
        bos_token=bos_token,
        eos_token=eos_token,
        eos_token_ids=_end_ids(folder, backend, eos_token),
        chat_templates=_chat_templates(folder, config),
    )
    steps = _decoder_steps(decoder)
    if "ByteLevel" in steps:
        return SubwordTokenizer(backend, special, spelling=byte_level_bytes, strips_leading_space=False)
    if "ByteFallback" in steps:
        return SubwordTokenizer(backend, special, spelling=byte_fallback_bytes, strips_leading_space="Strip" in steps)
    raise ModelError(f"{path} decodes by {'+'.join(steps) or 'nothing'}; supported are ByteLevel and ByteFallback.")


def _add_named_tokens(backend: tokenizers.Tokenizer, config: _Json) -> None:
    """Mark as special what the configuration calls so and the vocabulary has, as transformers does."""
    names = [_token_text(config.get(key)) for key in _NAMED_TOKENS]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key)
        names += [_token_text(token) for token in extra] if isinstance(extra, list) else []
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    new = [name for name in names if name and name not in known and backend.token_to_id(name) is not None]
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in new])


def _end_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> frozenset[int]:
    """Every id that any of the files calls the end of a text."""
    ids = {backend.token_to_id(eos_token)} if eos_token is not None else set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids.update(value if isinstance(value, list) else [value])
    return frozenset(token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0)


def _chat_templates(folder: Path, config: _Json) -> dict[str, str]:
    """By name; a file of its own comes before what the configurations say, as in transformers."""
    template = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
    else:
        named = {"default": template}
    if (folder / "chat_template.jinja").is_file():
        named = {"default": _read(folder / "chat_template.jinja", _MAX_CONFIG_BYTES)}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = _read(path, _MAX_CONFIG_BYTES)
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str) and text}


def _decoder_steps(decoder: Any) -> list[str]:
    """The kinds of the decoder's steps, in order."""
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [kind for step in decoder.get("decoders", []) for kind in _decoder_steps(step)]
    return [str(decoder.get("type"))]


def _token_text(token: Any) -> str | None:
    """A token as the configuration files spell it: a string, or an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read(path: Path, max_bytes: int) -> str:
    try:
        if path.stat().st_size > max_bytes:
            raise ModelError(f"{path} is larger than {max_bytes >> 20} MiB, more than any real file of its kind.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text: fetch the model again.") from error


def _read_json(path: Path) -> _Json:
    """The object in ``path``, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read(path, _MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON ({error}): fetch the model again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object: fetch the model again.")
    return content
