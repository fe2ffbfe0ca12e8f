"""Files read by offset: exact reads that name what went wrong. No mmap, because faulted pages count as our own memory.
And small files that are written whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tidegate.checkpoint.base import ByteArray
from tidegate.errors import CheckpointError, CorruptFile, ReadFailed


def cache_folder() -> Path:
    """TIDEGATE_CACHE, or ~/.cache/tidegate: converted stores, and what was measured of this machine."""
    return Path(os.environ.get("TIDEGATE_CACHE") or Path.home() / ".cache" / "tidegate").expanduser().absolute()


class InputFile:
    """One open file. ``size_bytes`` is its size when it was opened."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if the file cannot be opened."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
        self.size_bytes = os.fstat(self._fd).st_size

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def read(self, offset: int, nbytes: int) -> ByteArray:
        """Exactly ``nbytes`` bytes from ``offset``, uint8 (a copy). Raises ReadFailed naming offset, wanted and got."""
        out = np.empty(nbytes, np.uint8)
        view, done = memoryview(out.data), 0
        while done < nbytes:
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise ReadFailed(self.path, offset, nbytes, done, str(error.strerror)) from None
            if count == 0:
                raise ReadFailed(self.path, offset, nbytes, done, "the file ends here")
            done += count
        return out


def read_text(path: Path) -> str:
    """Raises CheckpointError for a file that cannot be read, CorruptFile for one that is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CorruptFile(path, error.start, "text", "UTF-8", "other bytes") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises as ``read_text``, and CorruptFile if it is not a JSON object."""
    return parse_json(read_text(path), path, 0)


def parse_json(text: str | bytes, path: Path, offset: int) -> dict[str, Any]:
    """The JSON object in ``text``, which starts at ``offset`` of ``path``. Raises CorruptFile."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CorruptFile(path, offset + error.pos, "JSON", "valid JSON", error.msg) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise CorruptFile(path, offset, "JSON", "valid JSON", type(error).__name__) from None
    if not isinstance(value, dict):
        raise CorruptFile(path, offset, "JSON", "an object", type(value).__name__)
    return value


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """To be written: ``path`` appears, and is on the disk, when the block ends well; otherwise nothing is left. Several
    processes may write the same file; the last one's stays."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
