from __future__ import annotations

from bench.profile_iteration import Profile, tables
from bench.profile_mesh import LiveProfile
from bench.profile_parts import ModelParts, python_parts
from bench.roofline import Roofline

ROOFLINE = Roofline(threads=(1, 2), read_bytes_s=(20e9, 40e9), multiplies_s=(1e11, 2e11))


def test_the_roofline_is_whatever_takes_longer() -> None:
    assert ROOFLINE.at_best_us(1, num_bytes=40e6) == 2000.0
    assert ROOFLINE.at_best_us(2, num_bytes=40e6, multiplies=1e9) == 5000.0


def test_parts_and_what_they_do_not_explain_sum_up_to_the_iteration() -> None:
    live = LiveProfile(
        num_requests=16,
        batch_size=16,
        num_iterations=100,
        iteration_us=12_000.0,
        compute_us=11_900.0,
        gap_us=100.0,
        ahead_us=11_000.0,
        token_interval_us=12_050.0,
        wall_us=12_500.0,
        num_cpus=2,
        cpu_us={"worker: compute": 20_000.0, "gateway: event loop": 1_000.0, "client: other threads": 0.2},
        cpu_wait_us={"worker: compute": 300.0},
    )
    parts = ModelParts(
        threads=1,
        products_us=6_000.0,
        attention_us=3_000.0,
        other_us=500.0,
        head_us=1_700.0,
        products_bytes=100_000_000,
        products_multiplies=1_000_000_000,
        attention_bytes=80_000_000,
        head_bytes=1,
        head_multiplies=200_000_000,
    )
    text = tables([Profile(live, parts, {"worker: prepare the step": 80.0})], ROOFLINE)
    assert "| matrix products | 6,000 (10,000) |" in text
    assert "| attention | 3,000 (4,000) |" in text
    assert "| output head, sampling | 1,700 (2,000) |" in text
    assert "shared | 700 |" in text
    assert "| **one iteration** | **12,000** |" in text
    assert "| output tokens/s | 1,333 |" in text
    assert "| idle, or other programs | 4,000 |" in text
    assert "client: other threads" not in text, "a row of zeros says nothing"
    assert "| worker: prepare the step | 80 |" in text


def test_python_is_profiled_function_by_function() -> None:
    taken = python_parts(num_sequences=3, prompt_tokens=20, num_iterations=10)
    assert {name.partition(":")[0] for name in taken} == {"scheduler", "worker", "gateway"}
    assert all(us > 0 for us in taken.values())
