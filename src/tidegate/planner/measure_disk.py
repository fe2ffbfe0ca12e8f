"""The disk under a path, by the engine's own loader and waits: one expert that is missing, several that queue, and loads beside
computation. Reads go past the page cache."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np

from tidegate import _core
from tidegate.backends.base import ByteArray
from tidegate.errors import ReadFailed
from tidegate.experts.loader import LoaderOptions
from tidegate.planner.machine import DiskRate
from tidegate.planner.measure_kernels import INPUTS, Kernels
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout

WIDTHS = (32, 96, 320, 1216, 4864, 16384)  # of experts of 0.1, 0.3, 1.1, 4.2, 17 and 57 MB
QUEUE, ALONE_ROUNDS, READ_BYTES, FILE_BYTES = 8, 12, 384 << 20, 384 << 20


def measure_disk(path: Path, kernels: Kernels) -> tuple[tuple[DiskRate, ...], float]:
    """(rates, speed of the kernels beside loads as a share of their speed alone). Random blocks of ``path``, a file that is
    dropped from the page cache first, or of a file that is written into that folder for a moment. Overwrites half of the
    kernels' memory."""
    layouts = [ExpertLayout.of(INPUTS, width, Format("int4", 32), False) for width in WIDTHS]
    fitting = [layout for layout in layouts if 2 * layout.blob_bytes <= kernels.weights.size // 2]
    if path.is_file() and path.stat().st_size >= 2 * fitting[-1].blob_bytes:
        return _measure(path, kernels, fitting)
    folder = path if path.is_dir() else path.parent
    with NamedTemporaryFile(dir=folder, prefix=".tidegate-hardware-") as file:
        data = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes()
        for _ in range(max(FILE_BYTES, 2 * fitting[-1].blob_bytes) // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return _measure(Path(file.name), kernels, fitting)


def _measure(path: Path, kernels: Kernels, layouts: list[ExpertLayout]) -> tuple[tuple[DiskRate, ...], float]:
    probes = [_Probe(path, kernels, layout) for layout in layouts]
    found = [probe.rates() for probe in probes]
    large = [share for probe, (_, share) in zip(probes, found, strict=True) if probe.is_large] or [found[-1][1]]
    return tuple(rate for rate, _ in found), min(1.0, float(np.median(large)))


class _Probe:
    """Experts of one size. The lower half of the memory is for those that are loaded, the upper for those that are there."""

    def __init__(self, path: Path, kernels: Kernels, layout: ExpertLayout) -> None:
        self._path, self._kernels, self._layout, self._size = path, kernels, layout, layout.blob_bytes
        half, memory = kernels.weights.size // 2, kernels.weights
        self._slots = min(QUEUE, half // self._size)
        self._memory = memory
        there = ExpertLayout.of(INPUTS, WIDTHS[min(3, len(WIDTHS) - 1)], Format("int4", 32), False)
        self._there = min((there, layout), key=lambda one: one.blob_bytes)
        self._ready = _core.ReadySlots(_views(memory[half:], self._there.blob_bytes))
        self._num_ready = half // self._there.blob_bytes
        blocks = path.stat().st_size // self._size
        self._places = cycle((np.random.default_rng(self._size).permutation(blocks) * self._size).tolist())
        self._x_TK = np.ones((1, INPUTS), np.float32)

    @property
    def is_large(self) -> bool:
        """Whether reading takes most of a load's time."""
        return self._size >= 1 << 20

    def rates(self) -> tuple[DiskRate, float]:
        """And the speed of the kernels beside these loads, as a share of their speed alone."""
        with self._loader() as loader:
            self._layer_s(loader, 1)
            compute_s = [self._computed_s(loader) for _ in range(ALONE_ROUNDS)]
            one_s = [self._layer_s(loader, 1) for _ in range(ALONE_ROUNDS)]
            rounds = max(3, min(32, READ_BYTES // (self._slots * self._size)))
            all_s = [self._layer_s(loader, self._slots) for _ in range(rounds)]
            latency_s = max(1e-9, float(np.median(one_s)) - float(np.median(compute_s)))
            behind_s = (float(np.median(all_s)) - float(np.median(one_s))) / max(1, self._slots - 1)
            bytes_per_s = self._size / behind_s if behind_s > 0 else self._size / latency_s
            beside, share = self._beside(loader, rounds)
        return DiskRate(self._size, latency_s, bytes_per_s, min(bytes_per_s, beside)), share

    def _layer_s(self, loader: _core.Loader, missing: int) -> float:
        """A layer for one token, all of whose experts are missing."""
        offsets = [next(self._places) for _ in range(missing)]
        start_s = time.perf_counter()
        for slot, offset in enumerate(offsets):
            loader.load(slot, 0, offset, self._size, 0, True)
        self._compute(loader, list(range(missing)), offsets)
        return time.perf_counter() - start_s

    def _computed_s(self, loader: _core.Loader) -> float:
        """The same for one expert that is there."""
        start_s = time.perf_counter()
        self._compute(loader, [0], [0])
        return time.perf_counter() - start_s

    def _compute(self, loader: _core.Loader, slots: list[int], offsets: list[int]) -> None:
        if not self._kernels.moe(self._x_TK, self._layout, slots, loader):
            bad = next(slot for slot in slots if loader.state(slot) == _core.SlotState.FAILED)
            failed = loader.failure(bad)
            raise ReadFailed(self._path, offsets[bad], self._size, failed.got_bytes, os.strerror(failed.error))

    def _beside(self, loader: _core.Loader, rounds: int) -> tuple[float, float]:
        """Bytes a second of loads while all threads compute experts that are there, and how fast they compute then."""
        alone_s, together_s = list[float](), list[float]()
        loaded, elapsed_s = 0, 0.0
        for number in range(rounds):
            alone_s.append(self._ready_s(number))
            for slot in range(self._slots):
                loader.load(slot, 0, next(self._places), self._size, 0, True)
            start_s = time.perf_counter()
            while not loader.is_ready(self._slots - 1) and loader.state(self._slots - 1) == _core.SlotState.LOADING:
                together_s.append(self._ready_s(number + len(together_s)))
            for slot in range(self._slots):
                loader.wait(slot)
            elapsed_s += time.perf_counter() - start_s
            loaded += self._slots * self._size
        together = float(np.median(together_s)) if together_s else float(np.median(alone_s))
        return loaded / elapsed_s, float(np.median(alone_s)) / together

    def _ready_s(self, turn: int) -> float:
        start_s = time.perf_counter()
        chosen = [(2 * turn + number) % self._num_ready for number in range(min(2, self._num_ready))]
        self._kernels.moe(self._x_TK, self._there, chosen, self._ready)
        return time.perf_counter() - start_s

    @contextmanager
    def _loader(self) -> Iterator[_core.Loader]:
        files, how = _core.FileSet([str(self._path)], _core.PosixReader(), False), LoaderOptions()
        _drop_from_cache(self._path)
        addresses = [self._memory.ctypes.data + slot * self._size for slot in range(self._slots)]
        loader = _core.Loader(files, addresses, self._size, how.threads, how.chunk_bytes, False, how.demand_chunks)
        try:
            yield loader
        finally:
            loader.close()


def _views(memory: ByteArray, size: int) -> list[ByteArray]:
    return [memory[start : start + size] for start in range(0, memory.size - size + 1, size)]


def _drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
