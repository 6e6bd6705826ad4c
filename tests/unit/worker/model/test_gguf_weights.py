"""A GGUF file, as llama.cpp's converter would write it, gives the logits of the safetensors it was made from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize, quantize

from services.worker.model.gguf_weights import GgufWeights
from shared.errors import ModelError
from shared.model.config import ModelConfig
from shared.model.rope import Llama3Rope, inverse_frequencies
from shared.model.source import GgufFile, HfFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _permuted(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return query or key rows as llama.cpp orders them."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _write(path: Path, model: Any, architecture: str, *, permute: bool, rope_freqs: list[float] | None = None) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 4 * config.hidden_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    if architecture == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(10000.0)
        writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else 16)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, dtype=np.float32))
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        data = parameter.detach().numpy()
        if permute and ("q_proj" in name or "k_proj" in name):
            data = _permuted(data, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if architecture == "gpt2" and ".h." in name and kind == "weight" and "ln_" not in name:
            data = data.T
        parts = module.split(".", 3)
        target = f"blk.{parts[2]}.{_NAMES[parts[3]]}" if len(parts) == 4 else _NAMES[module]
        writer.add_tensor(f"{target}.{kind}", np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["llama", "llama-tied-factors", "qwen2", "qwen3", "gpt2"])
def test_equals_safetensors(
    kind: str,
    make_hf_model: Callable[[Any], tuple[Path, Any]],
    tmp_path: Path,
    sequences: dict[str, list[int]],
    make_mesh: Callable[..., Any],
) -> None:
    factors = None
    match kind:
        case "llama":
            config: Any = transformers.LlamaConfig(**_SIZES, attention_bias=True)
        case "llama-tied-factors":
            config = transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True, rope_parameters=_LLAMA3)
            scaled = inverse_frequencies(16, 10000.0, Llama3Rope(8.0, 1.0, 4.0, 16))
            factors = [a / b for a, b in zip(inverse_frequencies(16, 10000.0, None), scaled, strict=True)]
        case "qwen2":
            config = transformers.Qwen2Config(**_SIZES)
        case "qwen3":
            config = transformers.Qwen3Config(**_SIZES, head_dim=16)
        case _:
            config = transformers.GPT2Config(vocab_size=99, n_embd=64, n_layer=3, n_head=4, n_positions=64)
    folder, model = make_hf_model(config)
    architecture = kind.split("-", maxsplit=1)[0]
    path = tmp_path / "model.gguf"
    _write(path, model, architecture, permute=architecture == "llama", rope_freqs=factors)

    expected = make_mesh(HfFolder(folder), 1, 1).run_mixed(sequences)
    for num_stages, tp_size in ((1, 1), (2, 2)):
        actual = make_mesh(GgufFile(path), num_stages, tp_size).run_mixed(sequences)
        for name, logits in actual.items():
            torch.testing.assert_close(logits, expected[name], atol=1e-4, rtol=0.0)


@pytest.fixture
def quantized(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    """A file with a Q8_0, a Q4_1 and an F16 matrix, and what they hold."""
    path = tmp_path / "quantized.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    numbers = np.random.default_rng(1)
    expected = {}
    for name, kind in (
        ("ffn_up", gguf.GGMLQuantizationType.Q8_0),
        ("ffn_gate", gguf.GGMLQuantizationType.Q4_1),
        ("ffn_down", gguf.GGMLQuantizationType.F16),
    ):
        data = quantize(numbers.normal(size=(50, 96)).astype(np.float32), kind)
        expected[name] = dequantize(data, kind)
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, expected


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(range(50), range(96)), (range(3, 17), range(96)), (range(50), range(32, 64)), (range(1, 2), range(33, 70))],
)
def test_any_part_of_a_quantized_matrix(
    quantized: tuple[Path, dict[str, np.ndarray[Any, Any]]], rows: range, columns: range
) -> None:
    path, expected = quantized
    weights = GgufWeights(path, ModelConfig.from_shape("qwen2.5-7b"))
    for file_name, name in (("ffn_up", "up_proj"), ("ffn_gate", "gate_proj"), ("ffn_down", "down_proj")):
        part = weights.read(f"layers.0.mlp.{name}.weight", (50, 96), rows, columns)
        whole = expected[file_name]
        assert np.array_equal(part.numpy(), whole[rows.start : rows.stop, columns.start : columns.stop])


def test_wrong_shape_and_missing_tensor_are_named(quantized: tuple[Path, dict[str, np.ndarray[Any, Any]]]) -> None:
    weights = GgufWeights(quantized[0], ModelConfig.from_shape("qwen2.5-7b"))
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight.*\[50, 96\].*\[50, 64\]"):
        weights.read("layers.0.mlp.up_proj.weight", (50, 64), range(50), range(64))
    with pytest.raises(ModelError, match=r"no tensor 'blk\.1\.ffn_up\.weight'"):
        weights.read("layers.1.mlp.up_proj.weight", (50, 96), range(50), range(96))


def test_every_truncation_and_many_damages_end_in_model_error(
    quantized: tuple[Path, dict[str, np.ndarray[Any, Any]]], tmp_path: Path
) -> None:
    data = quantized[0].read_bytes()
    broken = tmp_path / "broken.gguf"
    for length in [*range(0, 200, 7), 400, len(data) // 2, len(data) - 64]:
        broken.write_bytes(data[:length])
        with pytest.raises(ModelError):
            ModelConfig.from_gguf(broken)
    for at in range(4, 300):
        broken.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
        with pytest.raises(ModelError):  # the file has no token_embd, so that even a harmless change is refused
            ModelConfig.from_gguf(broken)
