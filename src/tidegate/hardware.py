"""What this machine can do, measured: reading memory with the compute threads, loading experts from disk."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import numpy as np

from tidegate import _core
from tidegate.backends.operands import ByteArray
from tidegate.experts.base import ExpertKey
from tidegate.experts.loader import NativeLoader

READ_ROUNDS = 3
MOST_LOADED_BYTES = 256 << 20


@dataclass(frozen=True)
class Rates:
    """``memory``: all compute threads together read the arena; ``disk``: demand loads of whole experts, 0 without experts;
    ``load_s``: one expert, alone."""

    memory_bytes_per_s: float
    memory_one_thread_bytes_per_s: float
    disk_bytes_per_s: float = 0.0
    load_s: float = 0.0


def memory_rate(memory: ByteArray, threads: int) -> float:
    """Bytes a second that ``threads`` threads read of ``memory``, which should be far larger than the caches."""
    return memory.size / _core.fastest_read_s(memory, threads, READ_ROUNDS)


def disk_rate(loader: NativeLoader, slots: int, slot_bytes: int, num_experts: int) -> tuple[float, float]:
    """(bytes a second, seconds of one expert alone) of loads of random experts of MoE layer 0 into the first ``slots``
    slots, which nobody may be using; a cache that thinks them free is right still. Raises ReadFailed or CorruptFile."""
    count = max(1, min(slots, num_experts, MOST_LOADED_BYTES // slot_bytes))
    experts = random.Random(0).sample(range(num_experts), count)  # numpy's would take 4 MB of the budget
    alone_s = []
    for expert in experts[: max(1, count // 4)]:
        start_s = time.perf_counter()
        loader.load(ExpertKey(0, expert), 0, demand=True)
        loader.wait(0)
        alone_s.append(time.perf_counter() - start_s)
    start_s = time.perf_counter()
    for slot, expert in enumerate(experts):
        loader.load(ExpertKey(0, expert), slot, demand=True)
    for slot in range(count):
        loader.wait(slot)
    return count * slot_bytes / (time.perf_counter() - start_s), float(np.median(alone_s))
