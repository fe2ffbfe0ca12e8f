"""Reading byte ranges of files into memory that somebody else owns, past the kernel's page cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tidegate import _core
from tidegate.errors import CheckpointError, ReadFailed

ByteArray = NDArray[np.uint8]

CHUNK_BYTES = 1 << 20  # one such request saturates a disk; larger ones only delay whoever comes next
_REPORT_BYTES = 32 << 20


def open_files(
    paths: Sequence[Path], *, page_cache: bool = False, reader: _core.BlockReader | None = None
) -> _core.FileSet:
    """Files for direct reads (buffered where the file system refuses; ``page_cache`` keeps everything in the kernel's
    cache). ``reader`` replaces the operating system's in tests. Raises CheckpointError for a file that cannot be opened."""
    try:
        return _core.FileSet([str(path) for path in paths], reader or _core.PosixReader(), page_cache)
    except OSError as error:
        raise CheckpointError(f"cannot open {error.args[1]}") from error


def read_into(
    path: Path,
    offset: int,
    dest: ByteArray,
    *,
    page_cache: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[int], None] | None = None,
    reader: _core.BlockReader | None = None,
) -> None:
    """Fill ``dest`` (uint8, contiguous, writable) with the file's bytes from ``offset`` on.

    Direct I/O needs ``offset`` and the address of ``dest`` to be multiples of 4096; anything else works, slower. So read
    whole sections, not tensors. ``progress`` is called with the bytes that arrived since its last call. Raises ReadFailed.
    """
    files = open_files([path], page_cache=page_cache, reader=reader)
    done = 0
    while done < dest.size:
        part = dest[done : done + _REPORT_BYTES]
        got, error = files.read(0, offset + done, part, chunk_bytes)
        if got != part.size:
            raise read_failure(path, offset, dest.size, done + got, error)
        done += got
        if progress is not None:
            progress(got)


def read_failure(path: Path, offset: int, wanted_bytes: int, got_bytes: int, error: int) -> ReadFailed:
    """The error for a read that stopped with ``error`` (an errno), or at the end of the file if that is 0."""
    reason = os.strerror(error) if error else "the file ends there; is it truncated?"
    return ReadFailed(path, offset, wanted_bytes, got_bytes, reason)
