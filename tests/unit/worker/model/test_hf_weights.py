"""Hugging Face folders: every layout that is in use is read, every damage is named."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from services.worker.model import load_stage
from services.worker.tensor_parallel import SingleRank
from shared.errors import ConfigError, ModelError
from shared.model.source import HfFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_FILE = "model.safetensors"


@pytest.fixture(scope="module")
def llama(make_hf_model: Callable[[Any], tuple[Path, Any]]) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return make_hf_model(config)[0]


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    copy = tmp_path / "model"
    shutil.copytree(llama, copy)
    return copy


def _load(folder: Path, *, layers: range = range(2)) -> Any:
    return load_stage(
        HfFolder(folder),
        layers=layers,
        is_first=True,
        is_last=True,
        tp=SingleRank(),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def _logits(make_mesh: Callable[..., Any], folder: Path) -> torch.Tensor:
    logits: torch.Tensor = make_mesh(HfFolder(folder), 2, 2).step({"a": [3, 1, 4]})["a"]
    return logits


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / _FILE)
    change(tensors)
    save_file(tensors, folder / _FILE)


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _shard(folder: Path) -> None:
    tensors = load_file(folder / _FILE)
    (folder / _FILE).unlink()
    weight_map: dict[str, str] = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_and_names_without_prefix_give_the_same(
    llama: Path, folder: Path, make_mesh: Callable[..., Any]
) -> None:
    expected = _logits(make_mesh, llama)
    _shard(folder)
    assert torch.equal(_logits(make_mesh, folder), expected)

    for file in folder.glob("model-*.safetensors"):
        save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model.', '"'))
    assert torch.equal(_logits(make_mesh, folder), expected)


def test_redundant_head_is_accepted_and_a_different_one_refused(folder: Path, make_mesh: Callable[..., Any]) -> None:
    _edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        _load(folder)
    _edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    redundant = _logits(make_mesh, folder)
    _edit(folder, lambda tensors: tensors.__delitem__("lm_head.weight"))
    assert torch.equal(_logits(make_mesh, folder), redundant)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(folder: Path, make_mesh: Callable[..., Any], dtype: torch.dtype) -> None:
    expected = _logits(make_mesh, folder)
    _edit(folder, lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))
    mesh = make_mesh(HfFolder(folder), 2, 2, dtype)
    actual = mesh.step({"a": [3, 1, 4]})["a"]
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=0.15, rtol=0.0)


def _remove_shard(folder: Path) -> None:
    _shard(folder)
    (folder / "model-1.safetensors").unlink()


def _escape(folder: Path) -> None:
    (folder / _FILE).rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../a.safetensors"}}')


def _damage_index(folder: Path) -> None:
    (folder / _FILE).unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')


def _truncate(folder: Path) -> None:
    data = (folder / _FILE).read_bytes()
    (folder / _FILE).write_bytes(data[: len(data) // 2])


def _integers(folder: Path) -> None:
    _edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / _FILE).unlink(), "neither model.safetensors nor .* pickled"),
        (_truncate, "model.safetensors is damaged or incomplete"),
        (lambda folder: (folder / _FILE).write_bytes(b""), "damaged or incomplete"),
        (_remove_shard, r"model-1\.safetensors is missing"),
        (_escape, "no safetensors file beside it"),
        (_damage_index, "index.json is damaged"),
        (
            lambda folder: _edit(folder, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight")),
            "no tensor 'layers.1.mlp.up_proj.weight'",
        ),
        (lambda folder: _edit_config(folder, intermediate_size=50), r"\[48, 32\] but config.json makes it \[50, 32\]"),
        (lambda folder: _edit_config(folder, vocab_size=100), r"embed_tokens.weight' has shape \[99, 32\]"),
        (_integers, "type I32"),
    ],
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message):
        _load(folder)


def test_layers_and_progress(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Layers 1 to 3 are not within the model's 2"):
        _load(folder, layers=range(1, 3))
    seen: list[tuple[int, int]] = []
    load_stage(
        HfFolder(folder),
        layers=range(1, 2),
        is_first=False,
        is_last=True,
        tp=SingleRank(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 2), (2, 2)]
