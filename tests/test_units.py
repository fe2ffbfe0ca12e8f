"""Bytes and durations, as people write and read them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import UsageError
from tidegate.units import align_up, format_bytes, format_seconds, parse_bytes

UNITS = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


@given(st.integers(1, 1 << 20), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_whole_numbers_are_exact_in_every_unit_and_spelling(count: int, unit: str, space: str) -> None:
    for spelled in (unit, unit.lower(), unit.upper()):
        assert parse_bytes(f" {count}{space}{spelled} ") == count * UNITS[unit]


@pytest.mark.parametrize(
    ("text", "wanted"), [("1.5GiB", 3 << 29), ("0.5 KB", 500), ("1PiB", 1 << 50), ("1024TiB", 1 << 50)]
)
def test_fractions_and_the_largest(text: str, wanted: int) -> None:
    assert parse_bytes(text) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8", "number with a unit"),
        ("8 gigs", "number with a unit"),
        ("", "number with a unit"),
        ("GiB", "number with a unit"),
        ("8,5GiB", "number with a unit"),
        ("1e3GiB", "number with a unit"),
        ("0GiB", "more than zero"),
        ("0.0001B", "more than zero"),
        ("-1GiB", "more than zero"),
        ("1025TiB", "more than 1 PiB"),
    ],
)
def test_what_is_no_size_names_flag_and_value(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"--ram {re.escape(repr(text))}: .*{said}"):
        parse_bytes(text, "--ram")


@given(st.integers(0, 1 << 50))
def test_three_digits_say_the_size(value: int) -> None:
    text = format_bytes(value)
    assert re.fullmatch(r"\d{1,3} B|\d\.\d\d [KMGT]iB|\d\d\.\d [KMGT]iB|\d{3,4} [KMGT]iB", text), text
    if value:
        assert parse_bytes(text) == pytest.approx(value, rel=0.0051)
    assert format_bytes(-value) == ("0 B" if value == 0 else f"-{text}")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 us"), (850e-6, "850 us"), (0.9996e-3, "1.0 ms"), (0.0123, "12.3 ms"), (0.99996, "1.00 s"), (4.2, "4.20 s"),
        (59.999, "1 min 00 s"), (185, "3 min 05 s"), (3599.7, "60 min 00 s"),
    ],
)  # fmt: skip
def test_durations(seconds: float, said: str) -> None:
    assert format_seconds(seconds) == said


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_align_up_is_the_next_multiple(value: int, alignment: int) -> None:
    got = align_up(value, alignment)
    assert got % alignment == 0 and value <= got < value + alignment
