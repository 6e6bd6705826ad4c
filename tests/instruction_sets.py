"""What processors can do, as Linux names it: the sets that our kernels are compiled for, and those that run here."""

from __future__ import annotations

from kernels.native.build import cpu_flags

__all__ = ["AVX2", "AVX512", "AVX512_BF16", "RUNNABLE"]

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
AVX512_BF16 = AVX512 | {"avx512_bf16"}

RUNNABLE = [flags for flags in (frozenset[str](), AVX2, AVX512, AVX512_BF16) if flags <= cpu_flags()]
