"""Text files that a user names."""

from __future__ import annotations

from pathlib import Path

from tidegate.errors import UsageError


def read_utf8(path: Path) -> str:
    """Raises UsageError for a file that is no UTF-8 text, OSError for one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text: byte {error.start:,} is wrong") from None
