"""The products of the compiled kernels against plain torch, and how they are compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kernels import reference
from kernels.native import library
from kernels.native.build import BuildError, InstructionSet, build, instruction_sets
from kernels.native.library import NativeKernels
from kernels.native.packing import Packer
from tests.instruction_sets import AMX, AVX2, AVX512, AVX512_BF16, RUNNABLE

if TYPE_CHECKING:
    from pathlib import Path


def q4_1(n: int, k: int) -> torch.Tensor:
    """Weights as a Q4_1 file has them: every group from its offset to its offset and 15 scales."""
    q = torch.randint(0, 16, (n, k // 32, 32))
    q[..., 0], q[..., 1] = 0, 15
    scale = (torch.rand(n, k // 32, 1) * 0.1 + 0.01).half().float()
    offset = (torch.rand(n, k // 32, 1) - 1.0).half().float()
    return (q * scale + offset).view(n, k)


@pytest.mark.parametrize(("n", "k"), [(16, 32), (48, 96), (37, 64), (1, 32), (70, 160)])
def test_weights_of_four_bits_are_met_exactly(kernels: NativeKernels, n: int, k: int) -> None:
    weight = q4_1(n, k)
    packed = Packer(kernels).pack(weight)
    assert packed.groups is not None
    rows = torch.randperm(n)
    assert torch.allclose(kernels.gather_rows(packed, rows), weight[rows], rtol=0, atol=2e-6)


def test_four_bits_in_eighths_of_the_largest_are_met_too(kernels: NativeKernels) -> None:
    """Q4_0: q - 8 eighths of the weight that is farthest from zero, which may have either sign."""
    q = torch.randint(3, 12, (20, 3, 32))
    q[..., 5] = 0
    scale = ((torch.rand(20, 3, 1) + 0.1) * torch.randint(0, 2, (20, 3, 1)).mul(2).sub(1)).half().float()
    weight = ((q - 8) * scale).view(20, 96)
    packed = Packer(kernels).pack(weight)
    assert packed.groups is not None
    error = (kernels.gather_rows(packed, torch.arange(20)) - weight).abs()
    assert (error <= 1e-3 * weight.abs().amax()).all()


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(kernels: NativeKernels, spoilt: float) -> None:
    x, norm = torch.randn(12, 96), torch.ones(96)
    x[1, 70] = spoilt
    for weight in (q4_1(40, 96), torch.randn(40, 96)):
        packed = Packer(kernels).pack(weight)
        for num_rows in (3, 12):
            for result in (kernels.linear(x[:num_rows], packed), kernels.linear(x[:num_rows], packed, norm, 1e-5)):
                assert result[1].isnan().all()
                assert result[[0, 2]].isfinite().all()


def test_weights_that_are_not_finite_have_no_four_bit_form(kernels: NativeKernels) -> None:
    weight = q4_1(16, 32)
    weight[3, 4] = float("nan")
    assert Packer(kernels).pack(weight).groups is None
    assert Packer(kernels).pack(q4_1(16, 32) * 1e7).groups is None


@pytest.mark.parametrize(("n", "k"), [(40, 128), (33, 32), (2, 96)])
def test_other_weights_lose_half_a_step_of_their_row_at_most(kernels: NativeKernels, n: int, k: int) -> None:
    weight = torch.randn(n, k)
    weight[n // 2] = 0.0
    packed = Packer(kernels).pack(weight)
    assert packed.groups is None
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((kernels.gather_rows(packed, torch.arange(n)) - weight).abs() <= 0.51 * step).all()


@pytest.mark.parametrize("four_bits", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 9, 13, 16, 64, 101, 250])
def test_products(kernels: NativeKernels, num_rows: int, *, four_bits: bool) -> None:
    weight = q4_1(72, 96) if four_bits else torch.randn(72, 96)
    packed = Packer(kernels).pack(weight)
    x, norm = torch.randn(num_rows, 96), torch.rand(96) + 0.5
    x[0] *= 1e4
    for result, expected in (
        (kernels.linear(x, packed), x @ weight.T),
        (kernels.linear(x, packed, norm, 1e-5), reference.rms_norm(x, norm, 1e-5) @ weight.T),
    ):
        error = (result - expected).norm(dim=1) / expected.norm(dim=1)
        assert (error < 0.03).all()  # 8-bit activations, and weights for many rows


def test_a_row_does_not_depend_on_the_others(kernels: NativeKernels) -> None:
    """As long as they are few, or many; and with weights that are not of 4 bits, in any case."""
    x, most = torch.randn(130, 128), min(kernels.few_rows, 130)
    for weight, few in ((q4_1(160, 128), most), (torch.randn(160, 128), 1)):
        packed = Packer(kernels).pack(weight)
        for num_rows in (few, 130):
            together = kernels.linear(x[:num_rows], packed)
            for row in {0, few - 1, num_rows // 2, num_rows - 1}:
                some = slice(0, row + 1) if row >= most else slice(row, row + 1)
                if num_rows == 130 and few > 1 and row < most:
                    some = slice(0, most + 1)
                assert torch.equal(kernels.linear(x[some], packed)[row - some.start], together[row])


def test_processors_agree_bit_for_bit(compiled: Path) -> None:
    """Sums of bytes are exact however they are taken, and added up in one order; without FMA they are rounded twice."""
    chosen = {runnable.name: runnable for runnable in RUNNABLE if runnable.name != "plain"}
    if not chosen:
        pytest.skip("this machine has no AVX2")
    x, weight = torch.randn(77, 160), torch.randn(100, 160)
    results = []
    for name, instructions in chosen.items():
        kernels = NativeKernels(build(instructions, compiled), name)
        results.append(kernels.linear(x, Packer(kernels).pack(weight)))
    assert all(torch.equal(result, results[0]) for result in results)


def test_without_a_compiler_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(instruction_sets(frozenset())[0], tmp_path)


def test_a_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env false --wrong")
    with pytest.raises(BuildError, match="env failed"):
        build(instruction_sets(frozenset())[0], tmp_path)


def test_a_compiler_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", 'g++ "')
    with pytest.raises(BuildError, match='CXX=g\\+\\+ " cannot be read'):
        build(instruction_sets(frozenset())[0], tmp_path)


def test_a_failed_compilation_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="error"):
        build(InstructionSet("wrong", ("-DORCA_WRONG", "-std=c++98")), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def wrong(mistake: str) -> InstructionSet:
    """Kernels that make a mistake in their check; soon compiled."""
    return InstructionSet("wrong", ("-O0", f"-DORCA_MISTAKE={mistake}"))


@pytest.mark.parametrize("mistake", ["return(1)", "__builtin_trap()"])
def test_kernels_that_fail_their_check_are_not_used_nor_tried_again(mistake: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"failed their check: exit code -?\d+$"):
        build(wrong(mistake), tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {"", ".failed"}
    with pytest.raises(BuildError, match="found before; to try again, delete"):
        build(wrong(mistake), tmp_path)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (frozenset(), ["plain"]),
        (AVX2, ["avx2", "plain"]),
        (AVX2 | {"avx_vnni"}, ["avx2-vnni", "avx2", "plain"]),
        (AVX512, ["avx512", "avx2", "plain"]),
        (AVX512_BF16, ["avx512-bf16", "avx512", "avx2", "plain"]),
        (AMX, ["avx512-bf16-amx", "avx512-bf16", "avx512", "avx2", "plain"]),
        (AVX512 - {"avx512_vnni"}, ["avx2", "plain"]),
    ],
)
def test_the_instruction_set_is_chosen_by_the_processor(flags: frozenset[str], names: list[str]) -> None:
    assert [chosen.name for chosen in instruction_sets(flags)] == names


def test_where_the_best_set_fails_the_next_one_is_taken(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    sets = [wrong("return(1)"), *instruction_sets(frozenset())]
    monkeypatch.setattr(library, "instruction_sets", lambda _flags: sets)
    kernels = library._load.__wrapped__()
    assert isinstance(kernels, NativeKernels)
    assert kernels.name == "plain"
    assert kernels.failures == ("wrong: the compiled kernels failed their check: exit code 1",)
