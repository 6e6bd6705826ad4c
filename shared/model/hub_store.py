"""Models of the Hugging Face hub: found in the hub's local cache, or downloaded into it.

Knows which of a repository's files a model needs. Nothing else of a repository is ever downloaded, pickles and code
least of all.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from shared.errors import ModelError, ModelNotFoundError

__all__ = ["hub_folder"]

_NEEDED_FILES = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]


def hub_folder(name: str) -> Path:
    """The local folder of the hub's model ``owner/name`` or ``owner/name@revision``.

    A complete copy in the hub's cache is used without asking the hub.

    Raises:
        ModelNotFoundError: the hub has no such model, or this user may not see it.
        ModelError: the hub cannot be reached and the model is not in the local cache.
    """
    import huggingface_hub
    from huggingface_hub import errors

    repository, _, revision = name.partition("@")
    download = partial(
        huggingface_hub.snapshot_download, repository, revision=revision or None, allow_patterns=_NEEDED_FILES
    )
    try:
        folder = Path(download(local_files_only=True))
        if _is_complete(folder):
            return folder
    except errors.LocalEntryNotFoundError:
        pass  # not in the cache, or only a part of it
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"hf:{name} is not a name that the hub can have; write hf:owner/name") from error
    try:
        folder = Path(download())
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ModelNotFoundError(
            f"the hub shows no model {name} to you: check the spelling, accept its licence on its page, or log in with "
            f"`hf auth login`"
        ) from error
    except Exception as error:  # whatever else the hub's and its HTTP client's code raises: the model is not here
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"cannot get hf:{name} from the model hub ({reason}). It is not in the local hub cache either; give the "
            f"path of a local folder or .gguf file, or a name of the catalogue (`orca models list`)"
        ) from error
    if not _is_complete(folder):
        raise ModelError(
            f"hf:{name} has no config.json with safetensors weights; other kinds of weights are not supported"
        )
    return folder


def _is_complete(folder: Path) -> bool:
    """Whether the configuration and every shard that the index names are there."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        return all((folder / shard).is_file() for shard in shards)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
