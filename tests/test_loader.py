"""The native loader on real files with real threads: right bytes under delays, named errors, order, cancellation."""

from __future__ import annotations

import errno
import math
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tidegate import _core
from tidegate.errors import CheckpointError, CorruptFile, ReadFailed
from tidegate.experts.base import ExpertKey
from tidegate.experts.cache import ExpertCache
from tidegate.experts.loader import Blob, LoaderOptions, NativeLoader
from tidegate.experts.policy import POLICIES

CHUNK = 4096
BLOB = 3 * CHUNK


class Store:
    """Random blobs in two shards; expert e of layer l is blob l * experts + e, odd ones in the second file."""

    def __init__(self, folder: Path, layers: int, experts: int, blob_bytes: int = BLOB) -> None:
        self.experts, self.blob_bytes = experts, blob_bytes
        data = np.random.default_rng(5).integers(0, 256, (layers * experts, blob_bytes), dtype=np.uint8)
        self.paths: Sequence[Path] = [folder / "experts-0.bin", folder / "experts-1.bin"]
        for file, path in enumerate(self.paths):
            path.write_bytes(bytes(4096) + data[file::2].tobytes())
        self.crcs = [zlib.crc32(row.tobytes()) for row in data]

    def blob(self, key: ExpertKey) -> Blob:
        number = key.layer * self.experts + key.expert
        return Blob(number % 2, 4096 + number // 2 * self.blob_bytes, self.blob_bytes, self.crcs[number])


def slots_of(count: int, nbytes: int = BLOB) -> list[NDArray[np.uint8]]:
    memory = np.zeros(count * nbytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return [memory[start + i * nbytes : start + (i + 1) * nbytes] for i in range(count)]


@contextmanager
def loader_of(
    store: Store, count: int, options: LoaderOptions | None = None, reader: _core.BlockReader | None = None
) -> Iterator[NativeLoader]:
    options = replace(options or LoaderOptions(), chunk_bytes=CHUNK)
    loader = NativeLoader(store, slots_of(count, store.blob_bytes), options, reader)
    try:
        yield loader
    finally:
        if isinstance(reader, _core.FaultyReader):
            reader.open_gate()
        loader.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for 30 s"
        time.sleep(0.0002)


def num_threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, layers=2, experts=16)


@pytest.mark.parametrize("policy", ["decayed-lfu", "lru"])
def test_the_right_bytes_are_there_at_the_moment_of_compute(store: Store, policy: str) -> None:
    """Capacity = top-k, 8 threads, random delays, guesses that are wrong half of the time; more than 10,000 loads."""
    top_k, rng = 4, random.Random(3)
    reader = _core.FaultyReader(seed=11, max_delay_us=150)
    with loader_of(store, 2 * top_k, LoaderOptions(threads=8, verify=True), reader) as loader:
        cache = ExpertCache([top_k, top_k], store.experts, POLICIES[policy], loader)
        step = 0
        while cache.counters.misses < 10_000:
            layer, step = step % 2, step + 1
            needed = sorted(rng.sample(range(store.experts), top_k if step % 16 else 3 * top_k))
            for placement in cache.visit(layer, needed):
                for guess in rng.sample(range(store.experts), 2):
                    cache.prefetch(1 - layer, guess, rng.choice([0.0, math.inf]))
                for expert, slot in zip(placement.experts, placement.slots, strict=True):
                    key = ExpertKey(layer, expert)
                    assert zlib.crc32(loader.wait(slot)) == store.blob(key).crc32, (step, key)
        cache.check_integrity()
        counters = loader.counters()
        assert counters.demand_loads + counters.speculative_loads + counters.cancelled_loads >= 10_000
        assert counters.cancelled_loads > 0 and counters.promoted_loads > 0 and counters.failed_loads == 0
        assert counters.waits > 0 and counters.wait_ns > 0 and counters.busy_ns > 0
        finished = (counters.demand_loads + counters.speculative_loads) * BLOB
        until(lambda: loader.counters().read_bytes >= finished)


def test_demand_goes_first_and_overtakes_between_chunks(store: Store) -> None:
    """One thread behind a gate: the order of its reads is exactly the order that the priorities ask for."""
    reader = _core.FaultyReader()
    reader.close_gate()
    with loader_of(store, 6, LoaderOptions(threads=1), reader) as loader:
        loader.load(ExpertKey(0, 0), 0, demand=False)
        until(lambda: reader.num_waiting == 1)  # its first chunk is in flight
        loader.load(ExpertKey(0, 2), 1, demand=False)
        loader.load(ExpertKey(0, 4), 2, demand=False)
        loader.load(ExpertKey(0, 6), 3, demand=True)
        loader.load(ExpertKey(0, 8), 4, demand=True)
        loader.promote(2)
        loader.promote(3)  # a demand load already: nothing changes
        reader.open_gate()
        for slot in range(5):
            loader.wait(slot)
        offsets = [store.blob(ExpertKey(0, expert)).offset for expert in (0, 6, 8, 4, 0, 2)]
        parts = [range(1), range(3), range(3), range(3), range(1, 3), range(3)]
        wanted = [offset + CHUNK * i for offset, part in zip(offsets, parts, strict=True) for i in part]
        assert [offset for offset, _, _ in reader.log()] == wanted
        counters = loader.counters()
        assert (counters.demand_loads, counters.speculative_loads) == (3, 2)
        assert (counters.promoted_loads, counters.overtaken_loads) == (1, 1)
        assert counters.read_bytes == 5 * BLOB and counters.wasted_bytes == 0


def test_cancelling_queued_in_flight_and_ready_loads(store: Store) -> None:
    reader = _core.FaultyReader()
    reader.close_gate()
    with loader_of(store, 3, LoaderOptions(threads=1), reader) as loader:
        loader.load(ExpertKey(0, 0), 0, demand=True)
        loader.load(ExpertKey(0, 2), 1, demand=True)
        until(lambda: reader.num_waiting == 1)
        assert loader.cancel(1) and loader.native.state(1) == _core.SlotState.EMPTY  # queued
        assert loader.cancel(0) and loader.native.state(0) == _core.SlotState.EMPTY  # a chunk is in flight
        loader.load(ExpertKey(0, 4), 0, demand=False)  # the same slot, while the old read still writes into it
        assert not loader.is_ready(0)
        reader.open_gate()
        assert zlib.crc32(loader.wait(0)) == store.blob(ExpertKey(0, 4)).crc32
        assert not loader.cancel(0) and loader.is_ready(0)  # too late: it is ready
        assert loader.cancel(2)  # never loaded: empty
        counters = loader.counters()
        assert (counters.cancelled_loads, counters.wasted_bytes) == (2, CHUNK)
        assert [offset for offset, _, _ in reader.log()][:1] == [store.blob(ExpertKey(0, 0)).offset]
        assert len(reader.log()) == 1 + 3


def test_a_waiter_wakes_up_when_its_load_is_cancelled(store: Store) -> None:
    reader = _core.FaultyReader()
    reader.close_gate()
    with loader_of(store, 1, reader=reader) as loader, ThreadPoolExecutor(1) as pool:
        loader.load(ExpertKey(0, 0), 0, demand=True)
        waiter = pool.submit(loader.native.wait, 0)
        time.sleep(0.02)  # long enough for it to fall asleep; if not, the test only proves less
        assert not waiter.done() and loader.cancel(0)
        assert waiter.result(timeout=30) is False
        with pytest.raises(RuntimeError, match="slot 0 is waited for but was never loaded"):
            loader.wait(0)


def test_misuse_is_refused(store: Store) -> None:
    reader = _core.FaultyReader()
    reader.close_gate()
    with loader_of(store, 1, reader=reader) as loader:
        loader.load(ExpertKey(0, 0), 0, demand=True)
        with pytest.raises(RuntimeError, match="slot 0 is loading"):
            loader.load(ExpertKey(0, 1), 0, demand=True)
        with pytest.raises(IndexError, match="slot 1 of 1"):
            loader.is_ready(1)
        with pytest.raises(ValueError, match="larger than the slot's 12288 bytes"):
            loader.native.load(0, 0, 0, BLOB + 1, 0, True)
        reader.open_gate()
        loader.wait(0)
        loader.close()
        with pytest.raises(RuntimeError, match="closed"):
            loader.load(ExpertKey(0, 1), 0, demand=True)


def test_an_io_error_names_the_place_and_the_slot_can_be_used_again(store: Store) -> None:
    with loader_of(store, 1, LoaderOptions(threads=1), _core.FaultyReader(fail_at=1)) as loader:
        loader.load(ExpertKey(1, 3), 0, demand=True)
        with pytest.raises(ReadFailed, match=os.strerror(errno.EIO)) as caught:
            loader.wait(0)
        blob, error = store.blob(ExpertKey(1, 3)), caught.value
        assert (error.path, error.offset) == (store.paths[1], blob.offset)
        assert (error.wanted_bytes, error.got_bytes) == (BLOB, CHUNK)
        assert not loader.is_ready(0) and loader.counters().failed_loads == 1
        loader.load(ExpertKey(1, 3), 0, demand=True)
        assert zlib.crc32(loader.wait(0)) == blob.crc32


def test_a_read_that_ends_short_is_an_error_and_one_that_goes_on_is_not(tmp_path: Path) -> None:
    store = Store(tmp_path, 1, 4, blob_bytes=1 << 16)
    table_options = LoaderOptions(threads=1, chunk_bytes=1 << 15)
    with_loader = NativeLoader(store, slots_of(1, 1 << 16), table_options, _core.FaultyReader(end_at=1))
    with_loader.load(ExpertKey(0, 2), 0, demand=True)
    with pytest.raises(ReadFailed, match=r"wanted 65,536 bytes, got 49,152 \(the file ends there"):
        with_loader.wait(0)
    with_loader.close()
    reader = _core.FaultyReader(short_at=1)
    recovers = NativeLoader(store, slots_of(1, 1 << 16), table_options, reader)
    recovers.load(ExpertKey(0, 2), 0, demand=True)
    assert zlib.crc32(recovers.wait(0)) == store.crcs[2]
    assert [nbytes for _, nbytes, _ in reader.log()] == [1 << 15, 1 << 15, 1 << 14]
    recovers.close()


@pytest.mark.parametrize("cut", [1, BLOB // 2, BLOB])
def test_a_truncated_file_never_gives_garbage(store: Store, cut: int) -> None:
    path = store.paths[1]
    os.truncate(path, path.stat().st_size - cut)
    with loader_of(store, 2) as loader:
        loader.load(ExpertKey(1, 13), 0, demand=True)
        loader.load(ExpertKey(1, 15), 1, demand=True)  # the last blob of the second file
        assert zlib.crc32(loader.wait(0)) == store.blob(ExpertKey(1, 13)).crc32
        with pytest.raises(ReadFailed, match="truncated") as caught:
            loader.wait(1)
        assert caught.value.path == path and caught.value.offset == store.blob(ExpertKey(1, 15)).offset
        assert (caught.value.wanted_bytes, caught.value.got_bytes) == (BLOB, BLOB - cut)


def test_verify_finds_a_flipped_bit(store: Store) -> None:
    blob = store.blob(ExpertKey(0, 7))
    with store.paths[blob.file].open("r+b") as file:
        file.seek(blob.offset + BLOB - 5)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    with loader_of(store, 1) as loader:
        loader.load(ExpertKey(0, 7), 0, demand=True)
        assert zlib.crc32(loader.wait(0)) != blob.crc32  # without --verify nobody looks
    with loader_of(store, 2, LoaderOptions(verify=True)) as loader:
        loader.load(ExpertKey(0, 7), 0, demand=True)
        loader.load(ExpertKey(0, 5), 1, demand=True)
        with pytest.raises(CorruptFile, match=rf"crc32 of expert 7 of MoE layer 0 at offset {blob.offset:,}") as caught:
            loader.wait(0)
        assert f"wanted {blob.crc32:08x}, got" in str(caught.value) and caught.value.path == store.paths[blob.file]
        loader.wait(1)


def test_a_missing_shard_is_named(store: Store) -> None:
    store.paths[1].unlink()
    with pytest.raises(CheckpointError, match=rf"cannot open {store.paths[1]}: No such file"):
        NativeLoader(store, slots_of(1))


def test_threads_end_on_close_even_in_the_middle_of_reads(store: Store) -> None:
    before = num_threads()
    for _ in range(20):
        reader = _core.FaultyReader(max_delay_us=3000)
        loader = NativeLoader(store, slots_of(8), LoaderOptions(threads=4, chunk_bytes=CHUNK), reader)
        assert num_threads() == before + 4
        for slot in range(8):
            loader.load(ExpertKey(0, slot), slot, demand=slot % 2 == 0)
        loader.close()
        assert num_threads() == before
        assert all(loader.native.state(slot) != _core.SlotState.LOADING for slot in range(8))
        loader.close()
    loader = NativeLoader(store, slots_of(1))
    del loader
    assert num_threads() == before


def test_a_file_system_without_direct_reads_falls_back(store: Store) -> None:
    reader = _core.FaultyReader(refuse_direct=True)
    with loader_of(store, 4, LoaderOptions(threads=1), reader) as loader:
        for slot, expert in enumerate((0, 2, 4)):
            loader.load(ExpertKey(0, expert), slot, demand=True)
            assert zlib.crc32(loader.wait(slot)) == store.blob(ExpertKey(0, expert)).crc32
        assert [direct for _, _, direct in reader.log()] == [True] + [False] * 9, "one refusal is enough"
