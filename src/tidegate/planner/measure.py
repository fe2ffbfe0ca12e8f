"""Measures this machine in a few seconds: memory, kernels, the disk under a path, and what a layer costs beside its bytes.

T tokens, N outputs, K inputs, S slots.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

import numpy as np

from tidegate import _core
from tidegate.backends.base import ByteArray
from tidegate.errors import ReadFailed, TidegateError
from tidegate.experts.loader import LoaderOptions
from tidegate.memory.arena import Arena
from tidegate.memory.ledger import Ledger
from tidegate.planner.machine import DiskRate, Machine, fingerprint
from tidegate.planner.tiny_store import write_tiny_store
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout
from tidegate.quant.native import native_format
from tidegate.units import align_up

FORMATS = ("int4-g32", "int8-g32", "mxfp4-g32", "bf16", "f32")
EXPERT_FORMATS = ("int4-g32", "int8-g32", "mxfp4-g32", "bf16")
BLOCK_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
MEMORY_BYTES, MATRIX_BYTES, FILE_BYTES, QUEUED_BYTES = 512 << 20, 8 << 20, 384 << 20, 512 << 20
INPUTS, WIDTH, EXPERTS, PROMPT_TOKENS = 2048, 768, 8, 256
ROUNDS = 4
_FILL = 0x33  # a byte that makes every format's scales and floats ordinary numbers


def measure_machine(path: Path, threads: int) -> Machine:
    """Takes about five seconds and 0.7 GiB. ``path``: a file to read, or a folder in which one is written for a moment.
    ``busy_ratio`` says how much others computed meanwhile."""
    others = OtherWork()
    isa = _core.available_isas()[0]
    with _memory(MEMORY_BYTES + (64 << 20)) as memory:
        weights, workspace = memory[:MEMORY_BYTES], memory[MEMORY_BYTES:]
        weights[:] = _FILL
        counts = sorted({1, *(1 << n for n in range(threads.bit_length()) if 1 << n <= threads), threads})
        bandwidth = {n: _Kernels(weights, _core.Compute(n, workspace, isa)).reads() for n in counts}
        kernels = _Kernels(weights, _core.Compute(threads, workspace, isa))
        decode = {name: kernels.decode(Format.parse(name)) for name in FORMATS}
        experts = {name: kernels.experts(Format.parse(name)) for name in EXPERT_FORMATS}
        prefill = {name: kernels.prefill(Format.parse(name)) for name in FORMATS}
        isas = {
            name: _Kernels(weights, _core.Compute(threads, workspace, name)).decode(Format("int4", 32))
            for name in _core.available_isas()
        }
    disk = measure_disk(path)
    layer_s, runtime_bytes = _engine_overhead(threads)
    busy = others.ratio()
    return Machine(
        fingerprint(), threads, bandwidth, decode, experts, prefill, isas, layer_s, disk, runtime_bytes, round(busy, 3)
    )


def measure_disk(path: Path) -> tuple[DiskRate, ...]:
    """Direct reads of random blocks of ``path`` (a file of at least 8 MiB, dropped from the page cache first), or of a file
    that is written into that folder for a moment."""
    if path.is_file() and path.stat().st_size >= 2 * BLOCK_SIZES[-1]:
        return tuple(_disk_rate(path, size) for size in BLOCK_SIZES)
    folder = path if path.is_dir() else path.parent
    with NamedTemporaryFile(dir=folder, prefix=".tidegate-hardware-") as file:
        data = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes()
        for _ in range(FILE_BYTES // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return tuple(_disk_rate(Path(file.name), size) for size in BLOCK_SIZES)


class _Kernels:
    """Rates of the native kernels on weights that are far larger than the caches."""

    def __init__(self, weights: ByteArray, compute: _core.Compute) -> None:
        self._weights, self._compute = weights, compute

    def reads(self) -> float:
        """Bytes a second of plain reads."""
        return self._weights.size / self._typical_s(
            lambda: _core.read_all(self._compute, self._weights), rounds=2 * ROUNDS
        )

    def decode(self, fmt: Format) -> float:
        """Packed bytes a second: one token through one matrix after the other, as large as those of real layers."""
        rows = _rows_of(fmt, MATRIX_BYTES)
        size = align_up(fmt.packed_bytes(rows, INPUTS), 4096)
        matrices = [self._matrix(fmt, rows, start) for start in range(0, self._weights.size - size, size)]
        turn = 0

        def run() -> None:
            nonlocal turn
            x = self._compute.from_numpy(np.ones((1, INPUTS), np.float32))
            for number in range(EXPERTS):
                _core.linear(self._compute, x, matrices[(turn + number) % len(matrices)])
            turn += EXPERTS

        return EXPERTS * fmt.packed_bytes(rows, INPUTS) / self._typical_s(run, rounds=3 * ROUNDS)

    def prefill(self, fmt: Format) -> float:
        """Multiply-adds a second: many tokens through a matrix."""
        rows = _rows_of(fmt, MATRIX_BYTES)
        matrix, inputs = self._matrix(fmt, rows, 0), np.ones((PROMPT_TOKENS, INPUTS), np.float32)
        elapsed_s = self._typical_s(
            lambda: _core.linear(self._compute, self._compute.from_numpy(inputs), matrix), rounds=ROUNDS
        )
        return PROMPT_TOKENS * rows * INPUTS / elapsed_s

    def experts(self, fmt: Format) -> float:
        """Packed bytes a second: one token through 8 experts, others every time."""
        layout = ExpertLayout.of(INPUTS, WIDTH, fmt, False)
        native = _core.ExpertLayout(
            INPUTS, WIDTH, native_format(fmt), native_format(fmt), False, layout.up_offset, layout.down_offset,
            layout.bias_offset,
        )  # fmt: skip
        size = layout.blob_bytes
        slots = [self._weights[start : start + size] for start in range(0, self._weights.size - size, size)]
        source, ids = _core.ReadySlots(slots), np.arange(EXPERTS, dtype=np.int32)[None]
        gates = np.full((1, EXPERTS), 1 / EXPERTS, np.float32)
        activation = _core.ActivationParams(_core.Activation.silu, 1.0, 0.0)
        turn = 0

        def run() -> None:
            nonlocal turn
            x = self._compute.from_numpy(np.ones((1, INPUTS), np.float32))
            step = _core.MoeStep(self._compute, x, ids, gates, native, activation)
            chosen = [(turn + n) % len(slots) for n in range(EXPERTS)]
            step.run(range(EXPERTS), chosen, source)
            step.finish()
            turn += EXPERTS

        return EXPERTS * size / self._typical_s(run, rounds=3 * ROUNDS)

    def _matrix(self, fmt: Format, rows: int, start: int) -> _core.PackedMatrix:
        data = self._weights[start : start + fmt.packed_bytes(rows, INPUTS)]
        return _core.PackedMatrix(data, native_format(fmt), rows, INPUTS, None)

    def _typical_s(self, run: Callable[[], object], rounds: int) -> float:
        """The median, after one round that does not count."""
        found = []
        for _ in range(rounds + 1):
            mark = self._compute.mark()
            start_s = time.perf_counter()
            run()
            found.append(time.perf_counter() - start_s)
            self._compute.release(mark)
        return float(np.median(found[1:]))


def _rows_of(fmt: Format, nbytes: int) -> int:
    """Rows of INPUTS that make a matrix of about that size."""
    return nbytes * 16 // fmt.packed_bytes(16, INPUTS) // 16 * 16


def _disk_rate(path: Path, block_bytes: int) -> DiskRate:
    """By the engine's own loader: one block alone, a dozen times (the median); then up to 128 more, queued."""
    files, how = _core.FileSet([str(path)], _core.PosixReader(), False), LoaderOptions()
    _drop_from_cache(path)
    places = np.random.default_rng(block_bytes).permutation(path.stat().st_size // block_bytes) * block_bytes
    alone, queued = places[:12].tolist(), places[12:][: max(2, min(128, QUEUED_BYTES // block_bytes))].tolist()
    with _memory(max(len(queued), 1) * block_bytes) as memory:
        slots = [memory.ctypes.data + number * block_bytes for number in range(max(len(queued), 1))]
        loader = _core.Loader(files, slots, block_bytes, how.threads, how.chunk_bytes, False, how.demand_chunks)

        def load_s(offsets: list[int]) -> float:
            start_s = time.perf_counter()
            for slot, offset in enumerate(offsets):
                loader.load(slot, 0, offset, block_bytes, 0, True)
            for slot, offset in enumerate(offsets):
                if not loader.wait(slot):
                    failed = loader.failure(slot)
                    raise ReadFailed(path, offset, block_bytes, failed.got_bytes, os.strerror(failed.error))
            return time.perf_counter() - start_s

        try:
            latency_s = float(np.median([load_s([offset]) for offset in alone]))
            together = queued or alone[:1]
            bytes_per_s = len(together) * block_bytes / load_s(together)
        finally:
            loader.close()
    return DiskRate(block_bytes, latency_s, bytes_per_s)


def _drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


_CHILD = """
import json, sys
import tidegate.cli.run
from tidegate import load
with load(sys.argv[1], memory="1GiB", context=256, threads=int(sys.argv[2])) as model:
    model.generate([1, 2, 3], max_tokens=16, ignore_eos=True)
    before = model.stats()
    model.generate([1, 2, 3], max_tokens=128, ignore_eos=True)
    after = model.stats()
    step_s = (after["decode_s"] - before["decode_s"]) / (after["decode_tokens"] - before["decode_tokens"])
    print(json.dumps([step_s / model.runtime.config.num_layers, model.plan.needs.runtime_bytes]))
"""


def _engine_overhead(threads: int) -> tuple[float, int]:
    """Seconds a layer, and bytes of the process before the arena: of a model whose weights are next to nothing."""
    with TemporaryDirectory(prefix="tidegate-hardware-") as folder:
        store = write_tiny_store(Path(folder) / "store")
        command = [sys.executable, "-c", _CHILD, str(store), str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TidegateError(f"the probe of a layer's overhead failed: {done.stderr.strip().splitlines()[-1:]}")
    layer_s, runtime_bytes = json.loads(done.stdout.splitlines()[-1])
    return float(layer_s), int(runtime_bytes)


@contextmanager
def _memory(nbytes: int) -> Iterator[ByteArray]:
    """Memory as the engine has it: huge pages, present."""
    ledger = Ledger(nbytes + (4 << 20))
    arena = Arena(ledger, nbytes)
    try:
        yield arena.carve(ledger.account("probe"), nbytes)
    finally:
        arena.close()


class OtherWork:
    """The share of the processors that other processes (and other machines on this host) take, from now on."""

    def __init__(self) -> None:
        self._start = self._read()

    def ratio(self) -> float:
        busy, everything, own = (now - then for now, then in zip(self._read(), self._start, strict=True))
        return max(0.0, busy - own) / everything if everything else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Busy and total seconds of all processors, and this process's own with its children."""
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        hertz = os.sysconf("SC_CLK_TCK")
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return (sum(ticks) - ticks[3] - ticks[4]) / hertz, sum(ticks) / hertz, own
