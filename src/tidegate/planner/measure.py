"""Measures this machine in a few seconds: memory, kernels, the disk under a path, and what a layer costs beside its bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tidegate import _core
from tidegate.backends.base import ByteArray
from tidegate.errors import TidegateError
from tidegate.memory.arena import Arena
from tidegate.memory.ledger import Ledger
from tidegate.planner.machine import TOKENS, Machine, Rates, fingerprint
from tidegate.planner.measure_disk import measure_disk
from tidegate.planner.measure_kernels import Kernels
from tidegate.planner.tiny_store import write_tiny_store
from tidegate.quant.formats import Format

FORMATS = ("int4-g32", "int8-g32", "mxfp4-g32", "bf16", "f32")
EXPERT_FORMATS = ("int4-g32", "int8-g32", "mxfp4-g32", "bf16")
MEMORY_BYTES, WORKSPACE_BYTES = 512 << 20, 64 << 20
_FILL = 0x33  # a byte that makes every format's scales and floats ordinary numbers


def measure_machine(path: Path, threads: int) -> Machine:
    """Takes about ten seconds and 0.7 GiB. ``path``: a file to read, or a folder in which one is written for a moment.
    ``busy_ratio`` says how much others computed meanwhile."""
    others = OtherWork()
    isa = _core.available_isas()[0]
    with probe_memory(MEMORY_BYTES + WORKSPACE_BYTES) as memory:
        weights, workspace = memory[:MEMORY_BYTES], memory[MEMORY_BYTES:]
        weights[:] = _FILL
        counts = sorted({1, *(1 << n for n in range(threads.bit_length()) if 1 << n <= threads), threads})
        bandwidth = {n: Kernels(weights, _core.Compute(n, workspace, isa)).reads() for n in counts}
        kernels = Kernels(weights, _core.Compute(threads, workspace, isa))
        dense = {name: _rates(kernels, name, experts=False) for name in FORMATS}
        experts = {name: _rates(kernels, name, experts=True) for name in EXPERT_FORMATS}
        int4 = Format("int4", 32)
        isas = {
            name: Kernels(weights, _core.Compute(threads, workspace, name)).dense(int4, 1)
            for name in _core.available_isas()
        }
        disk, beside_loads = measure_disk(path, kernels)
    layer_s, row_s, runtime_bytes = _engine_overhead(threads)
    busy = round(others.ratio(), 3)
    return Machine(
        fingerprint(), threads, bandwidth, dense, experts, isas, layer_s, row_s, disk, beside_loads, runtime_bytes, busy
    )  # fmt: skip


def _rates(kernels: Kernels, name: str, *, experts: bool) -> Rates:
    measure = kernels.experts if experts else kernels.dense
    return {tokens: measure(Format.parse(name), tokens) for tokens in TOKENS}


_CHILD = """
import json, sys
import tidegate.cli.run
from tidegate import load
from tidegate.config import SamplingOptions
from tidegate.engine.sequence import Sequence
with load(sys.argv[1], memory="1GiB", context=256, threads=int(sys.argv[2]), sequences=4) as model:
    engine, sampling = model.runtime.engine, SamplingOptions(ignore_eos=True)
    def step_s(count):
        running = [Sequence(n + 1, [1, 2, 3], 100, sampling) for n in range(count)]
        for sequence in running:
            engine.scheduler.add(sequence)
        engine.step()
        tokens, seconds = engine.times.decode_tokens, engine.times.decode_s
        while any(sequence.finish_reason is None for sequence in running):
            engine.step()
        return (engine.times.decode_s - seconds) / (engine.times.decode_tokens - tokens) * count
    step_s(1)
    one_s, four_s = step_s(1), step_s(4)
    layers = model.runtime.config.num_layers
    print(json.dumps([one_s / layers, max(0.0, four_s - one_s) / 3 / layers, model.plan.needs.runtime_bytes]))
"""


def _engine_overhead(threads: int) -> tuple[float, float, int]:
    """Of a model whose weights are next to nothing: seconds a layer, seconds a layer for each further sequence, and bytes of
    the process before the arena."""
    with TemporaryDirectory(prefix="tidegate-hardware-") as folder:
        store = write_tiny_store(Path(folder) / "store")
        command = [sys.executable, "-c", _CHILD, str(store), str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TidegateError(f"the probe of a layer's overhead failed: {done.stderr.strip().splitlines()[-1:]}")
    layer_s, row_s, runtime_bytes = json.loads(done.stdout.splitlines()[-1])
    return float(layer_s), float(row_s), int(runtime_bytes)


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
