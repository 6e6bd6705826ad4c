"""The numbers of an architecture: all that is needed to build any stage of a model, and nothing of its weights.

Knows what a valid decoder-only Transformer looks like; how each kind of file spells it is in ``hf_config``,
``gguf_config`` and ``shapes``. No torch here: the gateway and the scheduler read it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shared.errors import ModelError
from shared.model.source import GgufFile, HfFolder, ModelSource, RandomModel

if TYPE_CHECKING:
    from pathlib import Path

    from shared.model.rope import RopeScaling

__all__ = ["Activation", "DType", "Family", "ModelConfig", "load"]

Family = Literal["llama", "gpt2"]
Activation = Literal["silu", "gelu_tanh"]
DType = Literal["float32", "float16", "bfloat16"]

_LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "num_layers": 1 << 10,
    "num_heads": 1 << 10,
    "num_kv_heads": 1 << 10,
    "head_dim": 1 << 10,
    "intermediate_size": 1 << 19,
    "max_model_len": 1 << 27,
}
"""Upper bounds on what a file may claim, far above every published model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture of one decoder-only Transformer; valid by construction, else ModelError."""

    family: Family
    """``llama``: RMSNorm, RoPE, gated MLP. ``gpt2``: LayerNorm, learned positions, plain MLP."""
    architecture: str
    """The name that the file gave, for messages and reports."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_model_len: int
    """Longest context, tokens. A sliding window that is shorter than the context is the limit, because up to there
    attention to everything and attention to the window are the same."""
    norm_eps: float
    activation: Activation
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each query and key head before RoPE (Qwen3)."""
    tie_embeddings: bool = False
    """The output head is the embedding table."""
    dtype: DType = "float32"
    """Type of the weights in the file, or the nearest float type for quantized ones."""

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise ModelError(f"The model's {name} is {value}, which is not between 1 and {limit}: check its files.")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly: "
                "check the model's files."
            )
        if self.family == "llama" and self.head_dim % 2:
            raise ModelError(f"RoPE needs an even head size, the model's is {self.head_dim}: check its files.")
        if self.family == "gpt2" and (self.num_heads * self.head_dim, self.num_kv_heads) != (
            self.hidden_size,
            self.num_heads,
        ):
            raise ModelError(
                f"A GPT model's heads make up its hidden size, but {self.num_heads} x {self.head_dim} is not "
                f"{self.hidden_size}: check its files."
            )
        if not 0.0 < self.norm_eps < 1.0:
            raise ModelError(f"The model's norm epsilon is {self.norm_eps}, not between 0 and 1: check its files.")
        if not 1.0 < self.rope_theta < float("inf"):
            raise ModelError(f"The model's RoPE base is {self.rope_theta}, not above 1: check its files.")

    @classmethod
    def from_hf_folder(cls, path: Path) -> ModelConfig:
        """Read ``config.json`` of a Hugging Face folder; ModelError when it cannot be run."""
        from shared.model.hf_config import read_hf_config

        return read_hf_config(path)

    @classmethod
    def from_gguf(cls, path: Path) -> ModelConfig:
        """Read the header of a GGUF file; ModelError when it cannot be run."""
        from shared.model.gguf_config import read_gguf_config

        return read_gguf_config(path)

    @classmethod
    def from_shape(cls, name: str) -> ModelConfig:
        """Return the architecture of a published or test shape; ModelNotFoundError names those there are."""
        from shared.model.shapes import named_shape

        return named_shape(name)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of K and V that one token takes over all layers and ranks (no replication counted)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


def load(source: ModelSource) -> ModelConfig:
    """Return the architecture of ``source``; ModelError says what is wrong with it.

    A synthetic model has no architecture: whoever runs one does not ask.
    """
    match source:
        case HfFolder(path):
            return ModelConfig.from_hf_folder(path)
        case GgufFile(path):
            return ModelConfig.from_gguf(path)
        case RandomModel(shape, _):
            return ModelConfig.from_shape(shape)
        case _:
            raise ModelError("A synthetic model has no architecture: run it with the synthetic executor.")
