"""What is known of a machine: rates that `tidegate hardware` measured, kept under a fingerprint, or stated defaults."""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tidegate
from tidegate.backends.cuda.probe import CudaRates
from tidegate.checkpoint.files import cache_folder, whole_file
from tidegate.memory.probe import machine_memory
from tidegate.planner.costs import Bookkeeping, Cost, Overhead
from tidegate.quant.formats import Format

# Runtime before the arena: the engine with its libraries, and what a tokenizer adds for each entry of its vocabulary.
RUNTIME_BYTES, RUNTIME_BYTES_PER_TOKEN = 46 << 20, 280
_FILE = "hardware.json"
_MOST_OF_CACHE = 0.75  # others use it, too
TOKENS = (1, 2, 4, 8, 16, 64, 256)  # that one matrix serves, in the measurements
Rates = Mapping[int, float]  # tokens -> packed bytes of weights a second


@dataclass(frozen=True)
class DiskRate:
    """Direct reads of ``block_bytes`` by the loader: seconds of one alone, of which ``read_s`` are the read itself; bytes a
    second of those that queue while the compute threads wait, and while they compute (``beside_bytes_per_s``)."""

    block_bytes: int
    latency_s: float
    read_s: float
    bytes_per_s: float
    beside_bytes_per_s: float


@dataclass(frozen=True)
class Machine:
    """``memory``: bytes a second read by 1, 2, ... threads. ``dense`` and ``experts``: bytes of packed weights a second, by
    format and by how many tokens each of them serves (a matrix; 8 experts of a layer); ``cached_...``: of a model that stays in
    the last cache, of ``cache_bytes``, beside what ``overhead`` counts. ``isas``: int4 matrices at one token, by
    instruction set. ``overhead``: what a step costs beside weights, ``row_overhead``: each further sequence in it.
    ``beside_loads_ratio``: speed of the kernels while experts arrive, of that alone. ``drift_ratio``: how far the time of a small
    product of all threads moved during the measurement; on a virtual machine the processors themselves may move, and with them
    all that threads do together. ``busy_ratio``: the share of the processors
    that others took meanwhile. ``cuda``: the first device, if there is one."""

    fingerprint: str
    threads: int
    memory: Rates
    dense: Mapping[str, Rates]
    experts: Mapping[str, Rates]
    cache_bytes: int
    cached_dense: Mapping[str, Rates]
    cached_experts: Mapping[str, Rates]
    isas: Mapping[str, float]
    overhead: Overhead
    row_overhead: Overhead
    disk: tuple[DiskRate, ...]
    bookkeeping: Bookkeeping
    beside_loads_ratio: float = 1.0
    runtime_bytes: int = RUNTIME_BYTES
    busy_ratio: float = 0.0
    drift_ratio: float = 0.0
    is_measured: bool = True
    cuda: CudaRates | None = None

    def memory_bytes_per_s(self, threads: int) -> float:
        """With that many threads; more than were measured add nothing."""
        known = [count for count in self.memory if count <= threads]
        return self.memory[max(known, default=min(self.memory))]

    def decode_bytes_per_s(
        self, fmt: Format | None, *, experts: bool = False, tokens: float = 1, cached: bool = False
    ) -> float:
        """Packed bytes a second when they serve so many tokens; plain float32 (None) and formats that were not measured: the
        nearest kind. Between the numbers of tokens that were measured time grows evenly, beyond them with the tokens."""
        if cached:
            return 1 / _byte_s(_nearest(self.cached_experts if experts else self.cached_dense, fmt), tokens)
        return 1 / _byte_s(_nearest(self.experts if experts else self.dense, fmt), tokens)

    def keeps_in_cache(self, nbytes: int) -> bool:
        """Whether weights of so many bytes in all stay in the last cache from step to step."""
        return nbytes <= _MOST_OF_CACHE * self.cache_bytes

    def prefill_macs_per_s(self, fmt: Format | None) -> float:
        """Multiply-adds a second of a large prompt."""
        rates, bits = _nearest(self.dense, fmt), 32.0 if fmt is None else fmt.bits_per_weight(4096, 4096)
        most = max(rates)
        return rates[most] * most * 8 / bits

    def load_s(self, nbytes: int) -> float:
        """One block of that size, alone."""
        first, second = self._around(nbytes)
        if second is first:
            return first.latency_s * max(1.0, nbytes / first.block_bytes)
        return first.latency_s + self._share(nbytes) * (second.latency_s - first.latency_s)

    def first_read_s(self, nbytes: int) -> float:
        """What reading a block that is alone takes longer than reading one that was queued."""
        first, second = self._around(nbytes)
        read_s = first.read_s + self._share(nbytes) * (second.read_s - first.read_s)
        return max(0.0, read_s - nbytes / self.disk_bytes_per_s(nbytes))

    def _share(self, nbytes: int) -> float:
        """Where a size is between the two that were measured around it."""
        first, second = self._around(nbytes)
        return (nbytes - first.block_bytes) / max(1, second.block_bytes - first.block_bytes)

    def disk_bytes_per_s(self, nbytes: int) -> float:
        """Many blocks of that size, queued, while nobody computes."""
        return self._between(nbytes, lambda rate: rate.bytes_per_s)

    def beside_bytes_per_s(self, nbytes: int) -> float:
        """As ``disk_bytes_per_s``, while all threads compute."""
        return self._between(nbytes, lambda rate: rate.beside_bytes_per_s)

    def _between(self, nbytes: int, bytes_per_s: Callable[[DiskRate], float]) -> float:
        """Between sizes that were measured the time of a block grows evenly; smaller blocks take as long as the smallest."""
        first, second = self._around(nbytes)
        first_s, second_s = (rate.block_bytes / bytes_per_s(rate) for rate in (first, second))
        if second is first:
            return nbytes / (first_s * max(1.0, nbytes / first.block_bytes))
        return nbytes / (first_s + self._share(nbytes) * (second_s - first_s))

    def _around(self, nbytes: int) -> tuple[DiskRate, DiskRate]:
        at = bisect_left([rate.block_bytes for rate in self.disk], nbytes)
        if at == 0:
            return self.disk[0], self.disk[0]
        return (self.disk[at - 1], self.disk[at]) if at < len(self.disk) else (self.disk[-1], self.disk[-1])

    def with_rates(self, memory_bytes_per_s: int | None, disk_bytes_per_s: int | None) -> Machine:
        """Another machine: its memory or disk bandwidth as given; kernels in proportion to memory as long as reading weights is
        most of their time."""
        out = self
        if memory_bytes_per_s:
            factor = memory_bytes_per_s / self.memory_bytes_per_s(self.threads)
            out = replace(
                out,
                memory={count: rate * factor for count, rate in self.memory.items()},
                dense={fmt: _with_memory(rates, factor) for fmt, rates in self.dense.items()},
                experts={fmt: _with_memory(rates, factor) for fmt, rates in self.experts.items()},
            )
        if disk_bytes_per_s:
            factor = disk_bytes_per_s / max(rate.bytes_per_s for rate in self.disk)
            faster = (
                DiskRate(
                    rate.block_bytes,
                    rate.latency_s / factor,
                    rate.read_s / factor,
                    rate.bytes_per_s * factor,
                    rate.beside_bytes_per_s * factor,
                )
                for rate in self.disk
            )
            out = replace(out, disk=tuple(faster))
        return out

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Machine:
        disk = tuple(DiskRate(**rate) for rate in data["disk"])
        kinds = ("dense", "experts", "cached_dense", "cached_experts")
        kernels = {kind: {fmt: _by_number(rates) for fmt, rates in data[kind].items()} for kind in kinds}
        cuda = CudaRates(**data["cuda"]) if data.get("cuda") else None
        return Machine(
            **{
                **data,
                **kernels,
                "cuda": cuda,
                "memory": _by_number(data["memory"]),
                "disk": disk,
                "overhead": Overhead.from_json(data["overhead"]),
                "row_overhead": Overhead.from_json(data["row_overhead"]),
                "bookkeeping": Bookkeeping.from_json(data["bookkeeping"]),
            }
        )


def assumed_machine(threads: int) -> Machine:
    """Stated defaults, for a machine nobody has measured: a laptop with an SSD."""
    kinds = {
        "int4-g32-m8": (0.8, 4.25),
        "int4-g32": (0.8, 4.5),
        "mxfp4-g32": (0.8, 4.5),
        "int8-g32": (0.9, 8.5),
        "bf16": (0.9, 16),
        "f32": (0.9, 32),
    }
    memory = {count: min(count, 2) * 12e9 for count in range(1, threads + 1)}
    macs_per_s = threads * 50e9
    rates = {
        kind: {count: min(share * memory[threads], macs_per_s * bits / 8 / count) for count in TOKENS}
        for kind, (share, bits) in kinds.items()
    }
    disk = tuple(
        DiskRate(size, 80e-6 + size / 2e9, 50e-6 + size / 2e9, 2e9, 2e9)
        for size in (1 << 16, 1 << 18, 1 << 20, 1 << 22)
    )
    bookkeeping = Bookkeeping(
        wake_s=30e-6,
        miss_s=10e-6,
        ahead_s=20e-6,
        rouse_s=20e-6,
        strain_s=10e-6,
        gate=Cost(10e-6, 2e-6),
        access=Cost(5e-6, 1e-6),
    )
    overhead, further = Overhead(100e-6, Cost(100e-6, 2e-6)), Overhead(20e-6, Cost(15e-6, 0.5e-6))
    return Machine(
        "", threads, memory, rates, rates, 0, {}, {}, {}, overhead, further, disk, bookkeeping, is_measured=False
    )


def fingerprint() -> str:
    """Changes when the processor, the memory, the cores this process may use, or the program do."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = sorted(
        {line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "flags", "Model"))}
    )
    known = [names, len(os.sched_getaffinity(0)), machine_memory().total_bytes, tidegate.__version__]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def file_system(path: Path | str) -> str:
    """The device of the file system that ``path``, or its nearest folder that exists, is on."""
    where = Path(path).expanduser().absolute()
    while not where.exists():
        where = where.parent
    return str(where.stat().st_dev)


def load_machine(path: Path | str) -> Machine:
    """What was measured of this machine and of the disk under ``path`` (or of another disk of it), else the defaults."""
    found = _kept().get(fingerprint(), {})
    kept = found.get(file_system(path)) or next(iter(found.values()), None)
    if kept is not None:
        try:
            return Machine.from_json(kept)
        except (KeyError, TypeError, ValueError):  # written by another version
            pass
    return assumed_machine(len(os.sched_getaffinity(0)))


def keep_machine(machine: Machine, path: Path | str) -> Path:
    """Keep a measurement for the file system of ``path``; returns the file."""
    file = cache_folder() / _FILE
    everything = _kept()
    everything.setdefault(machine.fingerprint, {})[file_system(path)] = machine.to_json()
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as output:
        output.write(json.dumps(everything, indent=1).encode())
    return file


def _kept() -> dict[str, dict[str, Any]]:
    try:
        found = json.loads((cache_folder() / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _by_number(rates: Mapping[str, float]) -> Rates:
    return {int(count): rate for count, rate in rates.items()}


def _byte_s(rates: Rates, tokens: float) -> float:
    """Seconds a byte of weights that serves so many tokens."""
    known = sorted(rates)
    at = bisect_left(known, tokens)
    if at == 0:
        return 1 / rates[known[0]]
    if at == len(known):
        return tokens / known[-1] / rates[known[-1]]
    low, high = known[at - 1], known[at]
    return 1 / rates[low] + (tokens - low) / (high - low) * (1 / rates[high] - 1 / rates[low])


def _with_memory(rates: Rates, factor: float) -> Rates:
    """Rates under another memory bandwidth: arithmetic takes as long as before."""
    reading = rates[min(rates)]
    return {
        count: rate * factor if rate > reading / 2 else min(rate, reading * factor) for count, rate in rates.items()
    }


def _nearest(rates: Mapping[str, Rates], fmt: Format | None) -> Rates:
    name = "f32" if fmt is None else str(fmt)
    if name in rates:
        return rates[name]
    alike = [known for known in rates if known.partition("-")[0] == name.partition("-")[0]]
    if not alike:
        return min(rates.values(), key=lambda found: found[min(found)])
    return rates[max(alike, key=lambda known: known.endswith("-m8") == name.endswith("-m8"))]
