"""The compiled kernels against plain torch, for each instruction set that this machine can run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from kernels import reference
from kernels.native.build import BuildError, InstructionSet, build, cpu_flags, instruction_set
from kernels.native.library import CShape, CStep, NativeKernels

if TYPE_CHECKING:
    from pathlib import Path

FLAGS = cpu_flags()
AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"})
AVX2 = frozenset({"avx2", "fma", "f16c"})
SETS = [
    frozenset(flags) for flags in (frozenset(), AVX2, AVX2 | AVX512, AVX2 | AVX512 | {"avx512_bf16"}) if flags <= FLAGS
]


@pytest.fixture(scope="module", params=SETS, ids=lambda flags: instruction_set(flags).name)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    chosen = instruction_set(request.param)
    return NativeKernels(build(chosen, tmp_path_factory.mktemp("kernels")), chosen.name)


def q4_1(n: int, k: int) -> torch.Tensor:
    """Weights as a Q4_1 file has them: every group from its offset to its offset and 15 scales."""
    q = torch.randint(0, 16, (n, k // 32, 32))
    q[..., 0], q[..., 1] = 0, 15
    scale = (torch.rand(n, k // 32, 1) * 0.1 + 0.01).half().float()
    offset = (torch.rand(n, k // 32, 1) - 1.0).half().float()
    return (q * scale + offset).view(n, k)


def q8_0(n: int, k: int) -> torch.Tensor:
    q = torch.randint(-126, 127, (n, k // 32, 32))
    q[..., 0] = 127
    return (q * (torch.rand(n, k // 32, 1) * 0.01).half().float()).view(n, k)


@pytest.mark.parametrize(("n", "k"), [(16, 32), (48, 96), (37, 64), (1, 32)])
def test_what_a_file_has_quantised_is_met_exactly(kernels: NativeKernels, n: int, k: int) -> None:
    for weight, bits in ((q4_1(n, k), 4), (q8_0(n, k), 8)):
        packed = kernels.pack(weight)
        assert packed.bits == bits
        rows = torch.randperm(n)
        assert torch.allclose(kernels.gather_rows(packed, rows), weight[rows], rtol=0, atol=2e-6)


def test_other_weights_lose_half_a_step_at_most(kernels: NativeKernels) -> None:
    weight = torch.randn(40, 128)
    weight[3] = 0.0
    packed = kernels.pack(weight)
    assert packed.bits == 8
    step = weight.view(40, 4, 32).abs().amax(-1, keepdim=True).expand(-1, -1, 32).reshape(40, 128) / 127
    assert ((kernels.gather_rows(packed, torch.arange(40)) - weight).abs() <= 0.51 * step).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 15, 64, 65])
def test_products(kernels: NativeKernels, num_rows: int, bits: int) -> None:
    weight = q4_1(72, 96) if bits == 4 else torch.randn(72, 96)
    packed = kernels.pack(weight)
    exact = kernels.gather_rows(packed, torch.arange(72))
    x, norm = torch.randn(num_rows, 96), torch.rand(96) + 0.5
    x[0] *= 1e4
    for result, expected in (
        (kernels.linear(x, packed), x @ exact.T),
        (kernels.linear(x, packed, norm, 1e-5), reference.rms_norm(x, norm, 1e-5) @ exact.T),
    ):
        error = (result - expected).norm(dim=1) / expected.norm(dim=1)
        assert (error < 0.02).all()  # 8-bit activations


def test_a_row_does_not_depend_on_the_others(kernels: NativeKernels) -> None:
    packed = kernels.pack(q4_1(160, 128))
    x = torch.randn(67, 128)
    together = kernels.linear(x, packed)
    for row in (0, 7, 8, 40, 66):
        assert torch.equal(kernels.linear(x[row : row + 1], packed)[0], together[row])


class Paged:
    """Requests over paged K/V whose unused slots hold what would spoil every sum."""

    def __init__(
        self, lengths: list[tuple[int, int]], *, heads: int, kv_heads: int, dim: int, block_size: int = 16
    ) -> None:
        """``lengths``: for each request the tokens before this iteration and those of it."""
        generator = torch.Generator().manual_seed(len(lengths) + heads)
        self.shape, self.block_size = CShape(heads, kv_heads, dim), block_size
        ends = [before + new for before, new in lengths]
        num_blocks = [math.ceil(end / block_size) for end in ends]
        order = torch.randperm(sum(num_blocks) + 3, generator=generator).to(torch.int32)
        self.tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
        at = 0
        for request, count in enumerate(num_blocks):
            self.tables[request, :count] = order[at : at + count]
            at += count
        self.context_lens = torch.tensor(ends, dtype=torch.int32)
        self.query_start = torch.tensor([0, *(new for _, new in lengths)], dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        )
        self.q = torch.randn(int(self.query_start[-1]), heads, dim, generator=generator)
        self.kv = [
            (
                torch.randn(end, kv_heads, dim, generator=generator),
                torch.randn(end, kv_heads, dim, generator=generator),
            )
            for end in ends
        ]
        self.cache_shape = (len(order), block_size, kv_heads, dim)

    def slots(self, request: int) -> torch.Tensor:
        positions = torch.arange(int(self.context_lens[request]))
        blocks = self.tables[request, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size

    def native(self, kernels: NativeKernels, scale: float) -> torch.Tensor:
        k_cache, v_cache = (torch.full(self.cache_shape, float("nan"), dtype=torch.bfloat16) for _ in range(2))
        for request, (k, v) in enumerate(self.kv):
            kernels.store_kv(k, v, self.slots(request), k_cache, v_cache, self.shape)
        step = CStep(
            self.q.shape[0],
            len(self.kv),
            None,
            None,
            self.query_start.data_ptr(),
            self.context_lens.data_ptr(),
            self.tables.data_ptr(),
            self.tables.shape[1],
            self.block_size,
        )
        return kernels.attention(self.q, k_cache, v_cache, step, self.shape, scale)

    def expected(self, scale: float) -> torch.Tensor:
        k_cache, v_cache = (torch.zeros(self.cache_shape) for _ in range(2))
        for request, (k, v) in enumerate(self.kv):
            reference.write_kv(k.bfloat16().float(), v.bfloat16().float(), k_cache, v_cache, self.slots(request))
        return reference.paged_attention(
            self.q, k_cache, v_cache, self.query_start, self.context_lens, self.tables, scale
        )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(1, 1, 16), (4, 2, 64), (9, 3, 64), (8, 1, 80), (4, 4, 128), (34, 2, 32), (2, 1, 256)],
)
@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 1)],
        [(15, 1), (16, 1), (17, 1)],
        [(0, 50)],
        [(31, 18), (700, 1), (0, 1), (255, 2), (256, 1)],
        [(500, 13), (1, 1), (240, 40)],
    ],
    ids=str,
)
def test_attention(kernels: NativeKernels, lengths: list[tuple[int, int]], heads: int, kv_heads: int, dim: int) -> None:
    scale = dim**-0.5
    paged = Paged(lengths, heads=heads, kv_heads=kv_heads, dim=dim)
    result, expected = paged.native(kernels, scale), paged.expected(scale)
    assert (result - expected).abs().max() < 0.02  # bfloat16 queries and probabilities


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_attention_over_blocks_of_several_units(kernels: NativeKernels, block_size: int) -> None:
    paged = Paged([(33, 5), (300, 1)], heads=6, kv_heads=2, dim=32, block_size=block_size)
    assert (paged.native(kernels, 0.2) - paged.expected(0.2)).abs().max() < 0.02


def test_without_a_compiler_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(instruction_set(frozenset()), tmp_path)


def test_a_failed_compilation_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="error"):
        build(InstructionSet("wrong", ("-DORCA_WRONG", "-std=c++98")), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (frozenset(), "plain"),
        (AVX2, "avx2"),
        (AVX2 | AVX512, "avx512"),
        (AVX2 | AVX512 | {"avx512_bf16"}, "avx512-bf16"),
        (AVX512 - {"avx512_vnni"} | AVX2, "avx2"),
    ],
)
def test_the_instruction_set_is_chosen_by_the_processor(flags: frozenset[str], name: str) -> None:
    assert instruction_set(flags).name == name
