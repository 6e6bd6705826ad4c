from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from shared.errors import ModelError, ModelNotFoundError
from shared.model.config import ModelConfig, load
from shared.model.rope import LinearRope, Llama3Rope, YarnRope
from shared.model.shapes import SHAPE_NAMES
from shared.model.source import HfFolder, RandomModel, SyntheticModel

if TYPE_CHECKING:
    from pathlib import Path

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
_GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "n_inner": None,
    "activation_function": "gelu_new",
}


def _read(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return load(HfFolder(folder))


def test_llama_3_1(tmp_path: Path) -> None:
    assert _read(tmp_path, _LLAMA) == ModelConfig(
        family="llama",
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        max_model_len=131072,
        norm_eps=1e-5,
        activation="silu",
        rope_theta=500000.0,
        rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 8192),
        dtype="bfloat16",
    )


def test_old_and_new_spelling_are_the_same(tmp_path: Path) -> None:
    new = {key: value for key, value in _LLAMA.items() if key not in {"rope_theta", "rope_scaling", "torch_dtype"}}
    new |= {"dtype": "bfloat16", "rope_parameters": _LLAMA["rope_scaling"] | {"rope_theta": 500000.0}}
    assert _read(tmp_path, new) == _read(tmp_path, _LLAMA)


def test_gpt2(tmp_path: Path) -> None:
    config = _read(tmp_path, _GPT2)
    assert (config.family, config.intermediate_size, config.head_dim, config.tie_embeddings) == ("gpt2", 3072, 64, True)
    assert config.qkv_bias
    assert config.o_bias
    assert config.mlp_bias
    assert config.dtype == "float32"


def test_qwen_biases_and_norms(tmp_path: Path) -> None:
    plain = {key: value for key, value in _LLAMA.items() if key != "rope_scaling"}
    qwen2 = _read(tmp_path, plain | {"architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = _read(tmp_path, plain | {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 2048})
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)


@pytest.mark.parametrize(
    ("changes", "max_model_len"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, 4096),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 131072),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 4096}, 131072),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}, 131072),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 28,
            },
            4096,
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 32,
            },
            131072,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 512,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            512,
        ),
    ],
)
def test_context_ends_where_a_window_would_matter(tmp_path: Path, changes: dict[str, Any], max_model_len: int) -> None:
    assert _read(tmp_path, _LLAMA | changes).max_model_len == max_model_len


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "linear", "factor": 2}, LinearRope(2.0)),
        ({"rope_type": "default"}, None),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            YarnRope(4.0, 32768, 1.1386294361119891),
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, rope: dict[str, Any], expected: object) -> None:
    assert _read(tmp_path, _LLAMA | {"rope_scaling": rope}).rope_scaling == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "'MixtralForCausalLM' is not supported. Supported are Llama"),
        ({"architectures": []}, "architecture None"),
        ({"architectures": "LlamaForCausalLM"}, "is no list"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized \(awq\).*GGUF"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"hidden_size": "4096"}, "hidden_size is '4096', which is no int"),
        ({"hidden_size": True}, "is no int"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_key_value_heads": 5}, "cannot share 5 key-value heads"),
        ({"head_dim": 127}, "even head size"),
        ({"rms_norm_eps": -1.0}, "norm epsilon"),
        ({"rms_norm_eps": 10**400}, "is no float"),
        ({"rope_theta": float("nan")}, "RoPE base"),
        ({"torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn' are not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "RoPE scaling 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no rope parameter 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "must be above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        ({"rope_scaling": _LLAMA["rope_scaling"] | {"high_freq_factor": 1.0}}, "contradicts itself"),
        ({"rope_scaling": {"full_attention": {"rope_theta": 1e4}}}, "differs between layers"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _read(tmp_path, _LLAMA | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "gelu"}, "activation_function 'gelu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"n_head": 11}, "heads make up its hidden size"),
    ],
)
def test_unusual_gpt2_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _read(tmp_path, _GPT2 | changes)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\x00"])
def test_damaged_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json is not"):
        load(HfFolder(tmp_path))


def test_missing_config_and_synthetic_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load(HfFolder(tmp_path))
    with pytest.raises(ModelError, match="no architecture"):
        load(SyntheticModel())


def test_shapes_of_the_paper() -> None:
    """Layers and hidden sizes of ORCA §6, and about the parameters that give the models their names."""
    for name, layers, hidden in (
        ("gpt3-13b", 40, 5120),
        ("gpt3-101b", 80, 10240),
        ("gpt3-175b", 96, 12288),
        ("gpt3-341b", 120, 15360),
    ):
        config = load(RandomModel(name))
        assert (config.num_layers, config.hidden_size) == (layers, hidden)
        parameters = 12 * layers * hidden**2 + config.vocab_size * hidden
        assert parameters == pytest.approx(float(name.removeprefix("gpt3-").removesuffix("b")) * 1e9, rel=0.02)
    assert load(RandomModel("gpt3-175b")).kv_bytes_per_token(2) == 4_718_592


def test_shapes_for_tests_can_be_cut() -> None:
    tiny = load(RandomModel("tiny-llama"))
    assert tiny.num_layers >= 3
    assert tiny.num_kv_heads < tiny.num_heads
    assert tiny.vocab_size >= 260
    assert load(RandomModel("tiny-llama-30l")).num_layers == 30
    for name in SHAPE_NAMES:
        assert load(RandomModel(name)).architecture == name


def test_unknown_shape_names_the_known() -> None:
    with pytest.raises(ModelNotFoundError, match=r"'gpt5'.*tiny-llama.*gpt3-175b"):
        load(RandomModel("gpt5"))


def test_reading_a_config_needs_no_torch() -> None:
    code = (
        "import sys, shared.model.config, shared.model.hf_config, shared.model.gguf_config, shared.model.shapes;"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
