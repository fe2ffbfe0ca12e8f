"""Measures this machine in a few seconds: memory, kernels, the disk under a path, and what a layer costs beside its bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tidegate import _core
from tidegate.backends.operands import ByteArray
from tidegate.errors import TidegateError
from tidegate.memory.arena import Arena
from tidegate.memory.ledger import Ledger
from tidegate.planner.machine import TOKENS, Machine, Rates, fingerprint
from tidegate.planner.measure_disk import measure_disk
from tidegate.planner.measure_engine import SHAPES, parse
from tidegate.planner.measure_kernels import Kernels
from tidegate.planner.tiny_store import write_tiny_store
from tidegate.quant.formats import Format

FORMATS = ("int4-g32-m8", "int4-g32", "int8-g32", "mxfp4-g32", "bf16", "f32")
EXPERT_FORMATS = ("int4-g32-m8", "int4-g32", "int8-g32", "mxfp4-g32", "bf16")
MEMORY_BYTES, WORKSPACE_BYTES = 512 << 20, 64 << 20
PROCESSES = 3  # that run the engine: where the kernel puts their threads differs, and stays
_FILL = 0x33  # a byte that makes every format's scales and floats ordinary numbers


def measure_machine(path: Path, threads: int) -> Machine:
    """Takes about ten seconds and 0.7 GiB. ``path``: a file to read, or a folder in which one is written for a moment.
    ``busy_ratio`` and ``drift_ratio`` say how much it can be trusted."""
    others = OtherWork()
    isa = _core.available_isas()[0]
    with probe_memory(MEMORY_BYTES + WORKSPACE_BYTES) as memory:
        weights, workspace = memory[:MEMORY_BYTES], memory[MEMORY_BYTES:]
        weights[:] = _FILL
        counts = sorted({1, *(1 << n for n in range(threads.bit_length()) if 1 << n <= threads), threads})
        bandwidth = {n: Kernels(weights, _core.Compute(n, workspace, isa)).reads() for n in counts}
        kernels = Kernels(weights, _core.Compute(threads, workspace, isa))
        together_s = [kernels.together_s()]
        dense = {name: _rates(kernels.dense, name) for name in FORMATS}
        together_s.append(kernels.together_s())
        experts = {name: _rates(kernels.experts, name) for name in EXPERT_FORMATS}
        together_s.append(kernels.together_s())
        cache_bytes = last_cache_bytes()
        small = Kernels(weights[: min(MEMORY_BYTES, cache_bytes // 2)], kernels.compute)
        cached_dense, cached_experts = (
            {name: _rates(partial(small.cached, experts=of_experts), name) for name in names} if cache_bytes else {}
            for names, of_experts in ((FORMATS, False), (EXPERT_FORMATS, True))
        )
        int4 = Format("int4", 32)
        isas = {
            name: Kernels(weights, _core.Compute(threads, workspace, name)).dense(int4, 1)
            for name in _core.available_isas()
        }
        disk, beside_loads = measure_disk(path, kernels)
        together_s.append(kernels.together_s())
        with TemporaryDirectory(prefix="tidegate-hardware-") as folder:
            stores = [
                write_tiny_store(Path(folder) / f"{layers}-{per_token}", layers, per_token)
                for layers, per_token in SHAPES
            ]
            printed = []
            for _ in range(PROCESSES):
                printed.append(_engine_costs(threads, stores))
                together_s.append(kernels.together_s())
        costs = parse(printed)
    busy = round(others.ratio(), 3)
    return Machine(
        fingerprint(), threads, bandwidth, dense, experts, cache_bytes, cached_dense, cached_experts, isas, costs.overhead,
        costs.row_overhead, disk, costs.bookkeeping, beside_loads, costs.runtime_bytes, busy,
        round(max(together_s) / min(together_s) - 1, 3),
    )  # fmt: skip


def _rates(measure: Callable[[Format, int], float], name: str) -> Rates:
    return {tokens: measure(Format.parse(name), tokens) for tokens in TOKENS}


def last_cache_bytes() -> int:
    """The largest cache of the first processor; 0 if the kernel does not say."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(size.read_text().strip().removesuffix("K")) << 10 for size in sizes), default=0)


# The command line's modules first: they are part of the process that a model is loaded into.
_CHILD = """
import sys
import tidegate.cli.run
from tidegate.planner.measure_engine import main
main(int(sys.argv[1]), sys.argv[2:])
"""


def _engine_costs(threads: int, stores: list[Path]) -> str:
    """What a process of its own measures of the engine, as JSON."""
    command = [sys.executable, "-c", _CHILD, str(threads), *map(str, stores)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TidegateError(f"the probe of the engine's overhead failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout.splitlines()[-1]


@contextmanager
def probe_memory(nbytes: int) -> Iterator[ByteArray]:
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
