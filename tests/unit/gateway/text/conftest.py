"""The default model's file, fetched once per machine, and transformers' reading of it as the reference."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

from shared.model import store
from shared.model.source import GgufFile
from shared.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from shared.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return store.pull("smollm2-135m-instruct", progress=lambda _: None)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(GgufFile(smollm2_path))


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
