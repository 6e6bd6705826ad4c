"""What processors can do, as Linux names it: the sets that our kernels are compiled for, and those that run here."""

from __future__ import annotations

from kernels.native.build import InstructionSet, cpu_flags, instruction_sets

__all__ = ["AMX", "AVX2", "AVX512", "AVX512_BF16", "RUNNABLE"]

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
AVX512_BF16 = AVX512 | {"avx512_bf16"}
AMX = AVX512_BF16 | {"amx_tile", "amx_int8"}

RUNNABLE = instruction_sets(cpu_flags())
"""Those that this machine can run; where it has AVX-512, with AMX's own instructions in plain C++ and AVX-VNNI's in the
encoding of AVX-512 too."""
for _chosen in instruction_sets(AVX512 & cpu_flags()):
    if _chosen.name == "avx512":
        RUNNABLE.append(InstructionSet("amx-in-plain-c++", (*_chosen.flags, "-DORCA_AMX=2")))
        RUNNABLE.append(InstructionSet("avx-vnni-as-avx512", ("-march=x86-64-v3", "-mavx512vl", "-mavx512vnni")))
