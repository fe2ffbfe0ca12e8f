"""Bytes and durations: parsing what people write and printing what people read.

``GiB`` (1024**3) and ``GB`` (1000**3) both parse and differ. A bare number is refused, because nobody
can tell whether ``8`` means bytes or gigabytes.
"""

import re

from tidegate.errors import UsageError

_UNITS = {
    "B": 1,
    "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4,
    "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4, "PB": 1000**5, "PiB": 1024**5,
}  # fmt: skip
_SPELLING = {unit.lower(): unit for unit in _UNITS}
_PATTERN = re.compile(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]+)")
_LARGEST_BYTES = 1 << 50


def parse_bytes(text: str, flag: str = "--memory", example: str = "8GiB (1024**3) or 8GB (1000**3)") -> int:
    """Turn ``8GiB``, ``2200MB`` or ``4096 B`` into bytes. Raises UsageError naming ``flag`` and an ``example``."""
    match = _PATTERN.fullmatch(text.strip())
    unit = _SPELLING.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"{flag} {text!r}: write a number with a unit, like {example}")
    value = int(float(match[1]) * _UNITS[unit]) if "." in match[1] else int(match[1]) * _UNITS[unit]
    if value <= 0:
        raise UsageError(f"{flag} {text!r}: must be more than zero")
    if value > _LARGEST_BYTES:
        raise UsageError(f"{flag} {text!r}: more than 1 PiB is surely a mistake")
    return value


def format_bytes(value: int) -> str:
    """Three significant digits with a binary unit: ``1.50 GiB``, ``312 MiB``, ``17 B``."""
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 999.5 or unit == "TiB":
            break
        size /= 1024
    if unit == "B":
        return f"{value} B"
    digits = max(0, 2 - len(str(int(abs(size)))) + 1)
    return f"{size:.{digits}f} {unit}"


def format_seconds(value_s: float) -> str:
    """A duration for people: ``850 us``, ``12.3 ms``, ``4.20 s``, ``3 min 05 s``."""
    if value_s < 999.5e-6:  # what would be rounded up to 1000 us is 1.0 ms, and so on
        return f"{value_s * 1e6:.0f} us"
    if value_s < 0.99995:
        return f"{value_s * 1e3:.1f} ms"
    if value_s < 59.995:
        return f"{value_s:.2f} s"
    minutes, seconds = divmod(round(value_s), 60)
    return f"{minutes} min {seconds:02d} s"


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is not below ``value``."""
    return -(-value // alignment) * alignment
