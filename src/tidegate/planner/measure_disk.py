"""The disk under a path, by the engine's own loader and waits: one expert that is missing, several that queue, and loads beside
computation. Reads go past the page cache."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from tidegate import _core
from tidegate.backends.operands import ByteArray
from tidegate.errors import ReadFailed
from tidegate.experts.loader import LoaderOptions
from tidegate.planner.machine import DiskRate
from tidegate.planner.measure_kernels import INPUTS, Kernels
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout

# Hidden size and width of experts of 18 and 63 KB and 0.1, 0.3, 1.1, 4.2, 17 and 57 MB.
SHAPES = ((256, 32), (512, 64), *((INPUTS, width) for width in (32, 96, 320, 1216, 4864, 16384)))
THERE = (INPUTS, 1216)
# The disk of a shared host is another one every few hundred milliseconds, so every size has its turn several times.
PASSES, QUEUE, MOST_ROUNDS, READ_BYTES, FILE_BYTES = 6, 8, 40, 64 << 20, 384 << 20
MOST_SLOTS, BEFORE, WARM_UP_S = 128, 4, 10e-3
LEAST_BLOCKS, ENOUGH_BLOCKS = 2, 64
_TRIMMED = 0.05  # of the samples, at either end


def measure_disk(path: Path, kernels: Kernels) -> tuple[tuple[DiskRate, ...], float]:
    """(rates, speed of the kernels beside loads of large experts as a share of their speed alone). Random blocks of ``path``, a
    file that is dropped from the page cache first; where it is too small, or a folder, of a file that is written beside it for a
    moment. Overwrites half of the kernels' memory."""
    layouts = [_layout(shape) for shape in SHAPES]
    fitting = [layout for layout in layouts if 2 * layout.blob_bytes <= kernels.weights.size // 2]
    size = path.stat().st_size if path.is_file() else 0
    if size >= LEAST_BLOCKS * fitting[-1].blob_bytes:
        return _measure([path] * len(fitting), kernels, fitting)
    with TemporaryFile(dir=path if path.is_dir() else path.parent) as file:  # without a name, so it cannot stay
        data = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes()
        for _ in range(max(FILE_BYTES, LEAST_BLOCKS * fitting[-1].blob_bytes) // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        other = Path(f"/proc/self/fd/{file.fileno()}")
        places = [path if size >= ENOUGH_BLOCKS * layout.blob_bytes else other for layout in fitting]
        return _measure(places, kernels, fitting)


def _layout(shape: tuple[int, int]) -> ExpertLayout:
    return ExpertLayout.of(*shape, Format("int4", 32), False)


def _measure(paths: list[Path], kernels: Kernels, layouts: list[ExpertLayout]) -> tuple[tuple[DiskRate, ...], float]:
    for path in dict.fromkeys(paths):
        _drop_from_cache(path)
    probes = [DiskProbe(path, kernels, layout) for path, layout in zip(paths, layouts, strict=True)]
    for _ in range(PASSES):
        for probe in probes:
            probe.sample()
    large = [probe.share() for probe in probes if probe.is_large] or [probes[-1].share()]
    return tuple(probe.rate() for probe in probes), min(1.0, float(np.median(large)))


class DiskProbe:
    """Experts of one size. The lower half of the memory is for those that are loaded, all its slots in turn; the upper for those
    that are there."""

    def __init__(self, path: Path, kernels: Kernels, layout: ExpertLayout) -> None:
        self._path, self._kernels, self._layout, self._size = path, kernels, layout, layout.blob_bytes
        half, memory = kernels.weights.size // 2, kernels.weights
        self._num_slots = min(MOST_SLOTS, half // self._size)
        self._queue = min(QUEUE, self._num_slots)
        self._turns, self._last_slot = cycle(range(self._num_slots)), 0
        self._memory = memory
        self._there = min((_layout(THERE), layout), key=lambda one: one.blob_bytes)
        self._ready = _core.ReadySlots(_views(memory[half:], self._there.blob_bytes))
        self._num_ready = half // self._there.blob_bytes
        self._there_turns = cycle(range(self._num_ready))
        blocks = path.stat().st_size // self._size
        self._places = cycle((np.random.default_rng(self._size).permutation(blocks) * self._size).tolist())
        self._rounds = max(1, min(MOST_ROUNDS, READ_BYTES // (self._queue * self._size)))
        self._x_TK, self._there_TK = (np.ones((1, one.hidden_size), np.float32) for one in (layout, self._there))
        # Seconds of a layer whose expert is here, or missing; of a read alone, in a queue, beside computation; of computation
        # alone and beside reads.
        self._here_s, self._one_s = list[float](), list[float]()
        self._read_s, self._queued_s, self._beside_s = list[float](), list[float](), list[float]()
        self._alone_s, self._together_s = list[float](), list[float]()

    @property
    def is_large(self) -> bool:
        """Whether reading takes most of a load's time."""
        return self._size >= 1 << 20

    def sample(self) -> None:
        """One turn. Raises ReadFailed."""
        with self._loader() as loader:
            until_s = time.perf_counter() + WARM_UP_S
            while time.perf_counter() < until_s:
                self._layer_s(loader, 1)
            for _ in range(self._rounds):
                before_ns = loader.counters().busy_ns
                self._one_s.append(self._layer_s(loader, 1))
                one_ns = loader.counters().busy_ns
                self._here_s.append(self._computed_s(loader))
                self._layer_s(loader, self._queue)
                all_ns = loader.counters().busy_ns
                self._beside(loader)
                beside_ns = loader.counters().busy_ns
                read_s = ((one_ns - before_ns), (all_ns - one_ns) / self._queue, (beside_ns - all_ns) / self._queue)
                for times, ns in zip((self._read_s, self._queued_s, self._beside_s), read_s, strict=True):
                    times.append(ns * 1e-9)

    def rate(self) -> DiskRate:
        """Of many short loads the mean, since some of them wait until a thread gives up its core; of few long ones the middle."""
        queued_s, beside_s = _typical(self._queued_s), _typical(self._beside_s)
        alone_s = max(queued_s, _typical(self._one_s) - _typical(self._here_s))
        read_s = min(alone_s, _typical(self._read_s))
        return DiskRate(self._size, alone_s, read_s, self._size / queued_s, self._size / max(queued_s, beside_s))

    def share(self) -> float:
        """Speed of the kernels beside these loads, of their speed alone."""
        return float(np.median(self._alone_s) / np.median(self._together_s or self._alone_s))

    def _layer_s(self, loader: _core.Loader, missing: int) -> float:
        """A layer for one token: so many experts are missing, and two are there, which keep all threads busy for a moment. As if
        another layer of such experts had been computed before: how long a disk has slept matters."""
        slots = [next(self._turns) for _ in range(missing)]
        self._last_slot = slots[-1]
        offsets = [next(self._places) for _ in range(missing)]
        for _ in range(BEFORE):
            self._ready_s()
        start_s = time.perf_counter()
        for slot, offset in zip(slots, offsets, strict=True):
            loader.load(slot, 0, offset, self._size, 0, True)
        self._ready_s()
        self._compute(loader, slots, offsets)
        return time.perf_counter() - start_s

    def _computed_s(self, loader: _core.Loader) -> float:
        """One expert that is there: the last one that was loaded."""
        start_s = time.perf_counter()
        self._compute(loader, [self._last_slot], [0])
        return time.perf_counter() - start_s

    def _compute(self, loader: _core.Loader, slots: list[int], offsets: list[int]) -> None:
        if not self._kernels.moe(self._x_TK, self._layout, slots, loader):
            bad = next(at for at, slot in enumerate(slots) if loader.state(slot) == _core.SlotState.FAILED)
            failed = loader.failure(slots[bad])
            raise ReadFailed(self._path, offsets[bad], self._size, failed.got_bytes, os.strerror(failed.error))

    def _beside(self, loader: _core.Loader) -> None:
        """A queue of loads while all threads compute experts that are there."""
        self._alone_s.append(self._ready_s())
        slots = [next(self._turns) for _ in range(self._queue)]
        for slot in slots:
            loader.load(slot, 0, next(self._places), self._size, 0, True)
        while loader.state(slots[-1]) == _core.SlotState.LOADING:
            self._together_s.append(self._ready_s())
        for slot in slots:
            loader.wait(slot)

    def _ready_s(self) -> float:
        start_s = time.perf_counter()
        chosen = [next(self._there_turns) for _ in range(min(2, self._num_ready))]
        self._kernels.moe(self._there_TK, self._there, chosen, self._ready)
        return time.perf_counter() - start_s

    @contextmanager
    def _loader(self) -> Iterator[_core.Loader]:
        files, how = _core.FileSet([str(self._path)], _core.PosixReader(), False), LoaderOptions()
        addresses = [self._memory.ctypes.data + slot * self._size for slot in range(self._num_slots)]
        loader = _core.Loader(files, addresses, self._size, how.threads, how.chunk_bytes, False)
        try:
            yield loader
        finally:
            loader.close()


def _typical(samples: list[float]) -> float:
    """The mean without the extremes; of few samples, the middle half."""
    cut = int(len(samples) * (_TRIMMED if len(samples) >= PASSES * MOST_ROUNDS // 2 else 0.25))
    return float(np.mean(sorted(samples)[cut : len(samples) - cut]))


def _views(memory: ByteArray, size: int) -> list[ByteArray]:
    return [memory[start : start + size] for start in range(0, memory.size - size + 1, size)]


def _drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
