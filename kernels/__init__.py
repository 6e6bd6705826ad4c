"""The operations that a model is made of besides matrix products: one public function each, chosen by device.

``kernels.reference`` says what each one means, with shapes and types; ``kernels.cpu`` is the quick way on CPUs. Other
devices run the reference until they have their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels import cpu, reference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["apply_rotary", "argmax", "gelu_tanh", "layer_norm", "paged_attention", "rms_norm", "silu_mul", "write_kv"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last axis; x [..., n], weight [n]."""
    if x.device.type == "cpu":
        return cpu.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / std * weight + bias over the last axis; x [..., n]."""
    if x.device.type == "cpu":
        return cpu.layer_norm(x, weight, bias, eps)
    return reference.layer_norm(x, weight, bias, eps)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q [T, H, D] and k [T, KH, D] in place; cos and sin [T, D / 2] float32."""
    if q.device.type == "cpu":
        cpu.apply_rotary(q, k, cos, sin)
    else:
        reference.apply_rotary(q, k, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up; gate_up [..., 2n] holds the gate first."""
    if gate_up.device.type == "cpu":
        return cpu.silu_mul(gate_up)
    return reference.silu_mul(gate_up)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU by its tanh approximation."""
    if x.device.type == "cpu":
        return cpu.gelu_tanh(x)
    return reference.gelu_tanh(x)


def argmax(x: Tensor) -> Tensor:
    """Return where the largest element of the last axis is, [...] int64; x [..., n] float32."""
    return cpu.argmax(x) if x.device.type == "cpu" else reference.argmax(x)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v [T, KH, D] at slot_mapping [T] of the caches [num_blocks, block_size, KH, D]."""
    if k.device.type == "cpu":
        cpu.write_kv(k, v, k_cache, v_cache, slot_mapping)
    else:
        reference.write_kv(k, v, k_cache, v_cache, slot_mapping)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    """Return causal attention of each request over its own blocks, [T, H, D]; see ``reference.paged_attention``."""
    if q.device.type == "cpu":
        return cpu.paged_attention(q, k_cache, v_cache, query_start, context_lens, block_tables, scale)
    return reference.paged_attention(q, k_cache, v_cache, query_start, context_lens, block_tables, scale)
