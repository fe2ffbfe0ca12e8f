"""Files that a user names: texts to read, and results to write."""

from __future__ import annotations

import os
from pathlib import Path

from tidegate.errors import UsageError


def read_utf8(path: Path) -> str:
    """Raises UsageError for a file that is no UTF-8 text, OSError for one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text: byte {error.start:,} is wrong") from None


def check_output(path: Path, flag: str) -> None:
    """Raises UsageError if ``path``, the value of ``flag``, is no place for a file: before the work, not after it."""
    if path.is_dir():
        raise UsageError(f"{flag} {path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{flag} {path}: the folder {path.parent} cannot be written to")
