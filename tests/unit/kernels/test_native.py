"""The products of the compiled kernels against plain torch, and how they are compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kernels import reference
from kernels.native.build import BuildError, InstructionSet, build, instruction_set
from tests.instruction_sets import AVX2, AVX512, AVX512_BF16

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.native.library import NativeKernels


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
        (AVX512, "avx512"),
        (AVX512_BF16, "avx512-bf16"),
        (AVX512 - {"avx512_vnni"}, "avx2"),
    ],
)
def test_the_instruction_set_is_chosen_by_the_processor(flags: frozenset[str], name: str) -> None:
    assert instruction_set(flags).name == name
