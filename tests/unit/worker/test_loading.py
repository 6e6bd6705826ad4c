"""How numbers are held, by what is asked for, what the model is and what the machine has."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from structlog.testing import capture_logs

from kernels import compiled, memory
from kernels.native import library
from services.worker.loading import load, place_of
from shared.errors import ConfigError
from tests.fakes.fake_worker_peers import join_request

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator
    from pathlib import Path

    from services.worker.loading import LoadedStage

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of a model that can be quantised."""
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it leaves a thread behind
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def loaded(model: str, dtype: str) -> LoadedStage:
    return load(place_of(join_request(model, dtype=dtype), CPU), lambda _done, _total: None)


def events(logs: list[Any]) -> dict[str, str]:
    found = {line["event"]: line["reason"] for line in logs}
    assert len(found) == len(logs), "each is said once"
    return found


@pytest.mark.parametrize(
    ("dtype", "name", "activations", "kv"),
    [
        ("auto", "int8", torch.float32, torch.bfloat16),
        ("int8", "int8", torch.float32, torch.bfloat16),
        ("float32", "float32", torch.float32, torch.float32),
        ("bfloat16", "bfloat16", torch.bfloat16, torch.bfloat16),
        ("float16", "float16", torch.float16, torch.float16),
    ],
)
def test_what_a_cpu_holds(llama: str, dtype: str, name: str, activations: torch.dtype, kv: torch.dtype) -> None:
    try:
        library.load()
    except library.KernelsUnavailableError as error:
        pytest.skip(str(error))
    with capture_logs() as logs:
        stage = loaded(llama, dtype)
    assert not logs
    assert (stage.dtype_name, stage.dtype) == (name, activations)
    cache = stage.allocate_kv(3, 16)
    assert {tensor.dtype for layer in cache.layers for tensor in layer} == {kv}
    assert sum(tensor.nbytes for layer in cache.layers for tensor in layer) == 3 * stage.block_bytes(16)


def test_weights_weigh_what_they_are_held_in(llama: str) -> None:
    """Tensors of a kind, with norms and rotations; the packed ones, too."""
    in_float32, in_bfloat16, packed = (loaded(llama, dtype).weights_bytes for dtype in ("float32", "bfloat16", "int8"))
    num_weights = 2 * 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96)
    assert 4 * num_weights < in_float32 < 4.1 * num_weights
    assert 2 * num_weights < in_bfloat16 < 2.1 * num_weights
    assert num_weights < packed < in_bfloat16 + 2048 * 16 * 4  # cosines and sines of all positions


def test_weights_keep_no_memory_of_others(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[mmap.mmap]] = []

    def recorded(num_bytes: int) -> tuple[mmap.mmap, int]:
        mapped, start = real(num_bytes)
        made.append(weakref.ref(mapped))
        return mapped, start

    real = memory._map
    monkeypatch.setattr(memory, "_map", recorded)
    first = loaded(llama, "int8")
    num_first = len(made)
    second = loaded(llama, "int8")
    assert all(mapped() is not None for mapped in made)
    del first
    gc.collect()
    assert [mapped() is None for mapped in made] == [index < num_first for index in range(len(made))]
    assert second.weights_bytes > 0


@pytest.fixture
def without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for cached in (library._load, compiled._library):
        cached.cache_clear()
    yield
    for cached in (library._load, compiled._library):
        cached.cache_clear()


@pytest.mark.usefixtures("without_a_compiler")
def test_without_a_compiler_it_is_float32_and_the_log_says_why(llama: str) -> None:
    with capture_logs() as logs:
        stage = loaded(llama, "auto")
    assert stage.dtype_name == "float32"
    said = events(logs)
    assert "install g++" in said.pop("kernels_unavailable")
    assert not said


@pytest.mark.usefixtures("without_a_compiler")
def test_without_a_compiler_what_was_asked_for_is_not_changed(llama: str) -> None:
    with capture_logs() as logs:
        assert loaded(llama, "bfloat16").dtype_name == "bfloat16"
    assert list(events(logs)) == ["kernels_unavailable"]
    with pytest.raises(ConfigError, match="int8 cannot be had: there is no C\\+\\+ compiler"):
        loaded(llama, "int8")


def test_a_model_that_cannot_be_quantised_is_float32() -> None:
    with capture_logs() as logs:
        assert loaded("random:tiny-gpt2", "auto").dtype_name == "float32"
    assert "gpt2" in events(logs)["not_quantized"]
    with pytest.raises(ConfigError, match="int8 cannot be had: models of the gpt2 family"):
        loaded("random:tiny-gpt2", "int8")


def test_a_type_that_there_is_not(llama: str) -> None:
    with pytest.raises(ConfigError, match="--dtype must be one of auto, int8, float32, bfloat16, float16, not 'int4'"):
        loaded(llama, "int4")
