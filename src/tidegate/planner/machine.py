"""What is known of a machine: rates that `tidegate hardware` measured, kept under a fingerprint, or stated defaults."""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tidegate
from tidegate.checkpoint.convert.cache import cache_folder
from tidegate.memory.probe import machine_memory
from tidegate.quant.formats import Format

# Runtime before the arena: the engine with its libraries, and what a tokenizer adds for each entry of its vocabulary.
RUNTIME_BYTES, RUNTIME_BYTES_PER_TOKEN = 46 << 20, 280
_FILE = "hardware.json"


@dataclass(frozen=True)
class DiskRate:
    """Direct reads of ``block_bytes``: seconds of one alone, bytes a second of many, queued."""

    block_bytes: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Machine:
    """``memory``: bytes a second read by 1, 2, ... threads. ``decode`` and ``experts``: bytes of packed weights a second, by
    format, for one token (one matrix; the experts of a layer); ``prefill``: multiply-adds a second, by format, for 256.
    ``isas``: as ``decode``, int4, by instruction set. ``layer_s``: what a layer costs beside its weights. ``busy_ratio``:
    the share of the processors that others took meanwhile."""

    fingerprint: str
    threads: int
    memory: Mapping[int, float]
    decode: Mapping[str, float]
    experts: Mapping[str, float]
    prefill: Mapping[str, float]
    isas: Mapping[str, float]
    layer_s: float
    disk: tuple[DiskRate, ...]
    runtime_bytes: int = RUNTIME_BYTES
    busy_ratio: float = 0.0
    is_measured: bool = True

    def memory_bytes_per_s(self, threads: int) -> float:
        """With that many threads; more than were measured add nothing."""
        known = [count for count in self.memory if count <= threads]
        return self.memory[max(known, default=min(self.memory))]

    def decode_bytes_per_s(self, fmt: Format | None, *, experts: bool = False) -> float:
        """Packed bytes a second at one token; plain float32 and formats that were not measured: the nearest kind."""
        return _nearest(self.experts if experts else self.decode, fmt)

    def prefill_macs_per_s(self, fmt: Format | None) -> float:
        return _nearest(self.prefill, fmt)

    def load_s(self, nbytes: int) -> float:
        """One block of that size, alone."""
        first, second = self._around(nbytes)
        if second is first:
            return first.latency_s * max(1.0, nbytes / first.block_bytes)
        share = (nbytes - first.block_bytes) / (second.block_bytes - first.block_bytes)
        return first.latency_s + share * (second.latency_s - first.latency_s)

    def disk_bytes_per_s(self, nbytes: int) -> float:
        """Many blocks of that size, queued."""
        first, second = self._around(nbytes)
        return min(first.bytes_per_s, second.bytes_per_s) if nbytes < first.block_bytes else second.bytes_per_s

    def _around(self, nbytes: int) -> tuple[DiskRate, DiskRate]:
        at = bisect_left([rate.block_bytes for rate in self.disk], nbytes)
        if at == 0:
            return self.disk[0], self.disk[0]
        return (self.disk[at - 1], self.disk[at]) if at < len(self.disk) else (self.disk[-1], self.disk[-1])

    def with_rates(self, memory_bytes_per_s: int | None, disk_bytes_per_s: int | None) -> Machine:
        """Another machine: its memory or disk bandwidth as given, kernels in proportion to memory."""
        out = self
        if memory_bytes_per_s:
            factor = memory_bytes_per_s / self.memory_bytes_per_s(self.threads)
            out = replace(
                out,
                memory={count: rate * factor for count, rate in self.memory.items()},
                decode={fmt: rate * factor for fmt, rate in self.decode.items()},
                experts={fmt: rate * factor for fmt, rate in self.experts.items()},
            )
        if disk_bytes_per_s:
            factor = disk_bytes_per_s / max(rate.bytes_per_s for rate in self.disk)
            out = replace(
                out,
                disk=tuple(
                    DiskRate(rate.block_bytes, rate.latency_s / factor, rate.bytes_per_s * factor) for rate in self.disk
                ),
            )
        return out

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Machine:
        disk = tuple(DiskRate(**rate) for rate in data["disk"])
        return Machine(**{**data, "memory": {int(n): rate for n, rate in data["memory"].items()}, "disk": disk})


def assumed_machine(threads: int) -> Machine:
    """Stated defaults, for a machine nobody has measured: a laptop with an SSD."""
    kinds = {"int4-g32": 0.8, "mxfp4-g32": 0.8, "int8-g32": 0.9, "bf16": 0.9, "f32": 0.9}
    memory = {count: min(count, 2) * 12e9 for count in range(1, threads + 1)}
    decode = {kind: share * memory[threads] for kind, share in kinds.items()}
    disk = tuple(DiskRate(size, 80e-6 + size / 2e9, 2e9) for size in (1 << 16, 1 << 18, 1 << 20, 1 << 22))
    return Machine(
        "", threads, memory, decode, decode, dict.fromkeys(kinds, threads * 50e9), {}, 120e-6, disk, is_measured=False
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
    partial = file.with_name(f"{_FILE}.{os.getpid()}")
    partial.write_text(json.dumps(everything, indent=1))
    partial.rename(file)
    return file


def _kept() -> dict[str, dict[str, Any]]:
    try:
        found = json.loads((cache_folder() / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _nearest(rates: Mapping[str, float], fmt: Format | None) -> float:
    name = "f32" if fmt is None else str(fmt)
    if name in rates:
        return rates[name]
    kind = name.partition("-")[0]
    return next((rate for known, rate in rates.items() if known.partition("-")[0] == kind), min(rates.values()))
