"""Reading ranges of files into memory: any offset and size, direct or not, without leaving copies in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate import _core
from tidegate.checkpoint.reading import open_files, read_into
from tidegate.errors import CheckpointError, ReadFailed

FILE_BYTES = 300_001
DATA = np.random.default_rng(8).integers(0, 256, FILE_BYTES, dtype=np.uint8)


def write(path: Path) -> Path:
    with path.open("wb") as file:
        file.write(DATA.tobytes())
        os.fsync(file.fileno())  # dirty pages cannot be dropped
    drop_cache(path)
    return path


def drop_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def cached_pages(path: Path) -> int:
    """Pages of the file in the kernel's cache, by mincore(2)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        present = np.zeros(-(-view.size // 4096), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_size_t(view.size)
        assert libc.mincore(ctypes.c_void_p(view.ctypes.data), size, ctypes.c_void_p(present.ctypes.data)) == 0
        del view
    return int((present & 1).sum())


def aligned(nbytes: int, shift: int = 0) -> NDArray[np.uint8]:
    memory = np.zeros(nbytes + 8192, np.uint8)
    start = -memory.ctypes.data % 4096 + shift
    return memory[start : start + nbytes]


@pytest.fixture(scope="module", params=["/dev/shm", None], ids=["tmpfs", "disk"])
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    if request.param and not os.access(request.param, os.W_OK):
        pytest.skip(f"no {request.param} here")
    with TemporaryDirectory(dir=request.param) as folder:
        yield write(Path(folder) / "weights.bin")


ranges = st.tuples(
    st.one_of(st.integers(0, FILE_BYTES), st.integers(0, FILE_BYTES // 4096).map(lambda page: page * 4096)),
    st.one_of(st.integers(0, FILE_BYTES), st.integers(0, 60).map(lambda pages: pages * 4096)),
)


@settings(max_examples=150, deadline=None)
@given(ranges, st.sampled_from([0, 64, 1]), st.sampled_from([4096, 65536]), st.booleans(), st.integers(-1, 4))
def test_any_range_arrives_exactly(
    path: Path, where: tuple[int, int], shift: int, chunk: int, page_cache: bool, short_at: int
) -> None:
    offset, nbytes = where[0], min(where[1], FILE_BYTES - where[0])
    dest, arrived = aligned(nbytes, shift), []
    reader = _core.FaultyReader(short_at=short_at)
    read_into(path, offset, dest, page_cache=page_cache, chunk_bytes=chunk, progress=arrived.append, reader=reader)
    assert np.array_equal(dest, DATA[offset : offset + nbytes]) and sum(arrived) == nbytes


def test_past_the_end_is_an_error_with_the_bytes_that_were_there(path: Path) -> None:
    for offset in (0, 4096, 4097):
        with pytest.raises(ReadFailed, match="truncated") as caught:
            read_into(path, offset, aligned(FILE_BYTES - offset + 10))
        assert (caught.value.offset, caught.value.got_bytes) == (offset, FILE_BYTES - offset)
        assert caught.value.wanted_bytes == FILE_BYTES - offset + 10 and caught.value.path == path
    with pytest.raises(CheckpointError, match=r"cannot open .*/nothing: No such file or directory"):
        read_into(path.with_name("nothing"), 0, aligned(1))


@pytest.mark.parametrize("refuse_direct", [False, True])
def test_nothing_stays_in_the_page_cache_unless_asked(tmp_path: Path, refuse_direct: bool) -> None:
    path = write(tmp_path / "weights.bin")
    if cached_pages(path):
        pytest.skip("this file system keeps its pages")
    reader = _core.FaultyReader(refuse_direct=refuse_direct)
    dest = aligned(FILE_BYTES)
    read_into(path, 0, dest, chunk_bytes=65536, reader=reader)
    # Read-ahead may run past the last byte that was dropped, but not by more than a window.
    assert np.array_equal(dest, DATA) and cached_pages(path) <= 32
    assert any(direct for _, _, direct in reader.log())
    read_into(path, 0, dest, page_cache=True)
    assert cached_pages(path) == -(-FILE_BYTES // 4096)


def test_only_whole_pages_are_read_directly(tmp_path: Path) -> None:
    path = write(tmp_path / "weights.bin")
    reader = _core.FaultyReader()
    read_into(path, 8192, aligned(20_000), chunk_bytes=1 << 20, reader=reader)
    log = reader.log()
    if log[0][2]:  # the file system of tmp_path takes O_DIRECT
        assert log == [(8192, 16384, True), (24576, 20_000 - 16384, False)]
    assert not any(direct for _, _, direct in _direct_log(path, shift=64))


def _direct_log(path: Path, shift: int) -> list[tuple[int, int, bool]]:
    reader = _core.FaultyReader()
    read_into(path, 0, aligned(8192, shift), reader=reader)
    return reader.log()


def test_files_report_whether_they_are_read_directly(tmp_path: Path) -> None:
    path = write(tmp_path / "weights.bin")
    assert not open_files([path], page_cache=True).is_direct(0)
    files = open_files([path], reader=_core.FaultyReader(refuse_direct=True))
    files.read(0, 0, aligned(4096), 4096)
    assert not files.is_direct(0)
