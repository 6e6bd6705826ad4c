"""The operations besides matrix products of a model and of sampling: one public function each, chosen by device.

``kernels.reference`` says what each one means, with shapes and types; ``kernels.compiled`` is the quick way on CPUs.
Other devices run the reference until there is a version for them: a module, and a word in the operation's line below.
"""

from __future__ import annotations

from kernels import compiled, cpu, reference
from kernels.dispatch import by_device

__all__ = [
    "add_rms_norm",
    "argmax",
    "gelu_tanh",
    "layer_norm",
    "most_probable",
    "paged_attention",
    "rms_norm",
    "rotate_and_write_kv",
    "sample",
    "silu_mul",
    "write_kv",
]

add_rms_norm = by_device(reference.add_rms_norm, cpu=compiled.add_rms_norm)
argmax = by_device(reference.argmax, cpu=cpu.argmax)
gelu_tanh = by_device(reference.gelu_tanh, cpu=cpu.gelu_tanh)
layer_norm = by_device(reference.layer_norm, cpu=cpu.layer_norm)
most_probable = by_device(reference.most_probable, cpu=cpu.most_probable)
paged_attention = by_device(reference.paged_attention, cpu=compiled.paged_attention)
rms_norm = by_device(reference.rms_norm, cpu=compiled.rms_norm)
rotate_and_write_kv = by_device(reference.rotate_and_write_kv, cpu=compiled.rotate_and_write_kv)
sample = by_device(reference.sample, cpu=compiled.sample)
silu_mul = by_device(reference.silu_mul, cpu=compiled.silu_mul)
write_kv = by_device(reference.write_kv, cpu=compiled.write_kv)
