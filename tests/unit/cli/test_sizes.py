from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1024", 1024),
        (2048, 2048),
        ("512MiB", 512 << 20),
        ("1GiB", 1 << 30),
        ("1g", 1 << 30),
        ("1.5 gib", 3 << 29),
        ("2GB", 2 * 10**9),
        ("10 kb", 10_000),
        ("7b", 7),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_as_people_write_them(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-1", "1 XiB", "1e9", "GiB", "1" * 30, "0x10", "nan", "1.GiB", "1 iB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=1 << 44))
def test_a_number_of_bytes_is_itself(num_bytes: int) -> None:
    assert parse_size(str(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 30, "1.0 GiB"),
        (98_362_432, "93.8 MiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_format(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text
