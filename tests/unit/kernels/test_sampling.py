"""Each version of the draw against its definition in NumPy, and what is promised of rows that are unlike others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels as public
from kernels import compiled, cpu, reference
from kernels.native.build import build
from kernels.native.library import NativeKernels
from kernels.native.operations import Operations
from tests.instruction_sets import RUNNABLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    Sample = Callable[..., tuple[Tensor, Tensor]]

ROUNDING = 1e-6
"""Of sums of float32 weights, relative; targets and ends of filters that are nearer may fall on either side."""
LARGEST_UNIFORM = 1.0 - 2.0**-32
LARGEST_BELOW_1 = float(np.nextafter(np.float32(1.0), np.float32(0.0)))


class Parameters(NamedTuple):
    """Of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.5


def columns(rows: list[Parameters]) -> list[Tensor]:
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float64)
    return [torch.tensor([row[i] for row in rows], dtype=dtype) for i, dtype in enumerate(dtypes)]


@pytest.fixture(scope="module", params=["reference", "torch", *RUNNABLE], ids=lambda p: getattr(p, "name", p))
def sample(request: pytest.FixtureRequest, compiled: Path) -> Sample:
    if request.param == "reference":
        return reference.sample
    if request.param == "torch":
        return cpu.sample
    return Operations(NativeKernels(build(request.param, compiled), request.param.name)).sample


def distance(logits: np.ndarray[Any, Any], row: Parameters, token_id: int) -> float:
    """How far the target is from a token's part of the sum of weights, relative to the sum; 1 if it is not kept."""
    order = np.argsort(-logits, kind="stable")[: row.top_k or None]
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / row.temperature)
    # At 1 top-p is off; the sums would leave out what is less than their last bit.
    kept = ((np.cumsum(weights) - weights < row.top_p * weights.sum()) | (row.top_p >= 1.0)) & (weights >= row.min_p)
    kept[0] = True
    parts = np.zeros(len(logits))
    parts[order] = weights * kept
    ends = np.cumsum(parts) / parts.sum()
    if not parts[token_id]:
        return 1.0
    return float(max(ends[token_id] - parts[token_id] / parts.sum() - row.uniform, row.uniform - ends[token_id], 0.0))


def is_right(logits: np.ndarray[Any, Any], row: Parameters, token_id: int) -> bool:
    """Whether a token is the one that the definition gives, for parameters that rounding does not tell apart."""
    about = (1.0, 1.0 - ROUNDING, 1.0 + ROUNDING)
    alike = [
        row._replace(top_p=row.top_p * p if row.top_p < 1.0 else 1.0, min_p=min(row.min_p * m, 1.0))
        for p in about
        for m in about
    ]
    return any(distance(logits, other, token_id) <= ROUNDING for other in alike)


def random_parameters(numbers: np.random.Generator, vocab_size: int) -> Parameters:
    return Parameters(
        temperature=float(np.float32(numbers.choice([1e-5, 0.01, 0.3, 1.0, 1.0, 5.0, 1e4]))),
        top_k=int(numbers.choice([0, 0, 1, 2, 5, 50, 300, vocab_size - 1, vocab_size, vocab_size + 1])),
        top_p=float(np.float32(numbers.choice([0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, LARGEST_BELOW_1, 1.0, 1.0]))),
        min_p=float(np.float32(numbers.choice([0.0, 0.0, 1e-9, 0.02, 0.5, 1.0]))),
        uniform=float(numbers.choice([0.0, LARGEST_UNIFORM, *(numbers.integers(0, 1 << 32, 6) * 2.0**-32)])),
    )


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1 << 30),
    vocab_size=st.sampled_from([1, 2, 63, 64, 65, 257, 900, 5000]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 4.0, 100.0]),
    step=st.sampled_from([0.0, 0.5]),
    barred=st.sampled_from([0.0, 0.3, 0.99]),
)
def test_the_definition(sample: Sample, seed: int, vocab_size: int, scale: float, step: float, barred: float) -> None:
    """Peaked and flat rows, many equal logits, most tokens barred; ``step`` is the distance of different logits."""
    numbers = np.random.default_rng(seed)
    logits = numbers.normal(numbers.normal() * scale, scale, (6, vocab_size))
    logits = (np.round(logits / step) * step if step else logits).astype(np.float32)
    logits[:, 1:][numbers.random((6, vocab_size - 1)) < barred] = -np.inf
    rows = [random_parameters(numbers, vocab_size) for _ in logits]
    token_ids, valid = sample(torch.from_numpy(logits), *columns(rows))
    assert (token_ids.dtype, valid.dtype, bool(valid.all())) == (torch.int64, torch.bool, True)
    for one, row, token_id in zip(logits, rows, token_ids.tolist(), strict=True):
        assert is_right(one, row, token_id), row


def test_nearly_always_the_same_token_as_the_reference(sample: Sample) -> None:
    """So that nearness to an edge excuses little."""
    numbers = np.random.default_rng(5)
    logits = torch.randn(300, 2000, generator=torch.Generator().manual_seed(0)) * 3
    rows = [
        Parameters(numbers.choice([0.5, 1.0]), numbers.choice([0, 40]), numbers.choice([0.9, 1.0]), uniform=u)
        for u in numbers.random(300)
    ]
    expected, _ = reference.sample(logits, *columns(rows))
    token_ids, _ = sample(logits, *columns(rows))
    assert int((token_ids != expected).sum()) <= 1


def test_neither_company_nor_threads_change_a_token(sample: Sample) -> None:
    numbers = np.random.default_rng(2)
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(1)) * 3
    rows = [random_parameters(numbers, 1000) for _ in range(40)]
    together, _ = sample(logits, *columns(rows))
    backwards, _ = sample(logits.flip(0), *columns(rows[::-1]))
    assert torch.equal(backwards.flip(0), together)
    alone = [int(sample(logits[i : i + 1], *columns([row]))[0]) for i, row in enumerate(rows)]
    assert together.tolist() == alone
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    other, _ = sample(logits, *columns(rows))
    torch.set_num_threads(threads)
    assert torch.equal(other, together)


@pytest.mark.parametrize("row", [Parameters(top_k=1), Parameters(), Parameters(top_p=0.9), Parameters(top_k=200)])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 100, 299])
def test_what_cannot_be_drawn_from_is_told(sample: Sample, row: Parameters, bad: float, place: int) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    expected, _ = sample(logits, *columns([row] * 3))
    logits[1, place if bad != -torch.inf else slice(None)] = bad
    token_ids, valid = sample(logits, *columns([row] * 3))
    assert valid.tolist() == [True, False, True]
    assert token_ids.tolist() == [int(expected[0]), 0, int(expected[2])]


def test_equal_logits_rank_by_id(sample: Sample) -> None:
    uniform = (np.arange(2000) / 2000).tolist()

    def drawn(**values: Any) -> set[int]:
        token_ids, _ = sample(torch.zeros(2000, 1000), *columns([Parameters(uniform=u, **values) for u in uniform]))
        return set(token_ids.tolist())

    assert drawn(top_k=3) == {0, 1, 2}
    assert drawn(top_k=1) == {0}
    assert drawn(top_p=0.5) == set(range(500))
    assert drawn(top_k=100, top_p=0.5) == set(range(50))
    assert drawn(min_p=1.0) == set(range(1000))


def test_filters_end_where_they_should(sample: Sample) -> None:
    """Each token is a thousandth more probable than the one before it: the first that is kept is the last in rank."""
    logits = torch.linspace(0.001, 1.0, 1000).log()
    ends = [(25 * i + 0.5) / 1000 for i in range(40)]
    rows = [Parameters(min_p=end, uniform=0.0) for end in ends] + [Parameters(top_p=end, uniform=0.0) for end in ends]
    rows += [Parameters(top_k=int(1000 * end) + 1, top_p=0.5, uniform=0.0) for end in ends]
    token_ids, _ = sample(logits.repeat(len(rows), 1), *columns(rows))
    expected, _ = reference.sample(logits.repeat(len(rows), 1), *columns(rows))
    assert token_ids.tolist() == expected.tolist()
    assert all(is_right(logits.numpy(), row, token_id) for row, token_id in zip(rows, token_ids.tolist(), strict=True))
    assert token_ids[:40].tolist() == [25 * i for i in range(40)]


def test_what_is_barred_is_never_drawn(sample: Sample) -> None:
    logits = torch.full((8, 600), -torch.inf)
    logits[:, 17], logits[:, 301] = 0.0, -1.0
    for values in (
        {},
        {"top_p": LARGEST_BELOW_1},
        {"top_k": 400},
        {"temperature": 1e38},
        {"top_k": 599, "top_p": 0.99},
    ):
        rows = [Parameters(uniform=u, **values) for u in (0.0, 0.1, 0.7, 0.75, 0.9, 0.99, 0.5, LARGEST_UNIFORM)]
        token_ids, valid = sample(logits, *columns(rows))
        assert valid.all()
        assert set(token_ids.tolist()) == {17, 301}


def test_columns_of_other_types_and_with_gaps_are_read_for_what_they_are(sample: Sample) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    rows = [Parameters(temperature=0.7, top_k=k, top_p=0.75, min_p=0.125, uniform=0.3) for k in (0, 1, 7, 20, 200)]
    narrow, apart = (
        columns(rows),
        [torch.stack((c.long() if i == 1 else c.double(), -c), 1)[:, 0] for i, c in enumerate(columns(rows))],
    )
    assert torch.equal(sample(logits, *apart)[0], sample(logits, *narrow)[0])


def test_no_rows(sample: Sample) -> None:
    token_ids, valid = sample(torch.empty(0, 5), *columns([]))
    assert (token_ids.shape, valid.shape) == ((0,), (0,))


def test_logits_with_gaps_are_drawn_from_where_there_is_a_library_and_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(3))
    rows = columns([Parameters(uniform=0.3), Parameters(top_k=1), Parameters(top_k=3), Parameters(top_p=0.7)])
    expected, _ = reference.sample(logits, *rows)
    with_gaps = torch.cat((logits, logits), dim=1)[:, :90]
    for given_logits in (logits, with_gaps):
        assert torch.equal(public.sample(given_logits, *rows)[0], expected)
    monkeypatch.setattr(compiled, "_library", lambda: None)
    assert torch.equal(public.sample(logits, *rows)[0], expected)


@pytest.mark.parametrize("num_values", [2, 30, 100_000])
@pytest.mark.parametrize("count", [0, 1, 20, 256, 700])
@pytest.mark.parametrize("most_probable", [reference.most_probable, public.most_probable])
def test_the_most_probable_rank_by_id_among_equals(
    most_probable: Callable[[Tensor, int], tuple[Tensor, Tensor]], num_values: int, count: int
) -> None:
    logits = torch.randint(num_values, (9, 700), generator=torch.Generator().manual_seed(num_values)).float()
    values, token_ids = most_probable(logits, count)
    expected = np.argsort(-logits.numpy(), axis=-1, kind="stable")[:, :count]
    assert token_ids.tolist() == expected.tolist()
    assert torch.equal(values, logits.gather(-1, token_ids))
