"""A loader that charges a clock: one I/O channel, demand loads first, speculative ones in the gaps.

The channel serves one load at a time (one direct read of half a megabyte saturates the disks this is made for). A demand load
waits for the demand loads before it and for the chunk in flight, as in the native loader. All times are in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tidegate.experts.base import ExpertKey, Loader

CHUNK_BYTES = 1 << 20


@dataclass
class _Speculation:
    slot: int
    queued_s: float
    left_bytes: int


class ClockLoader(Loader):
    """``now_s`` is set by whoever simulates, and only ever grows. ``latency_s`` is paid once a load."""

    def __init__(self, num_slots: int, expert_bytes: int, bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.demand_bytes = self.speculative_bytes = 0
        self.busy_s = 0.0
        self._ready_s = [0.0] * num_slots
        self._free_s = 0.0
        self._expert_bytes, self._bandwidth, self._latency_s = expert_bytes, bandwidth_bytes_per_s, latency_s
        self._load_s = latency_s + expert_bytes / bandwidth_bytes_per_s
        self._queue: deque[_Speculation] = deque()

    def load(self, key: ExpertKey, slot: int, *, demand: bool) -> None:
        if demand:
            self._serve(slot, self._expert_bytes, self._load_s)
        else:
            self._ready_s[slot] = _NEVER
            self._queue.append(_Speculation(slot, self.now_s, self._expert_bytes))

    def cancel(self, slot: int) -> bool:
        self._catch_up()
        job = self._take(slot)
        if job is not None:
            self._ready_s[slot] = 0.0
        return job is not None

    def promote(self, slot: int) -> None:
        self._catch_up()
        job = self._take(slot)
        if job is not None:
            latency_s = self._latency_s if job.left_bytes == self._expert_bytes else 0.0
            self._serve(slot, job.left_bytes, latency_s + job.left_bytes / self._bandwidth)

    def is_ready(self, slot: int) -> bool:
        if self._queue:
            self._catch_up()
        return self._ready_s[slot] <= self.now_s

    def ready_s(self, slot: int) -> float:
        """When the slot's bytes are there. It must not be waiting as a speculation: demand and promoted loads only."""
        return self._ready_s[slot]

    def _serve(self, slot: int, nbytes: int, duration_s: float) -> None:
        if self._queue:
            self._catch_up()
        start_s = self._free_s if self._free_s > self.now_s else self.now_s
        self._free_s = self._ready_s[slot] = start_s + duration_s
        self.busy_s += duration_s
        self.demand_bytes += nbytes

    def _catch_up(self) -> None:
        """Speculative chunks that began before now."""
        while self._queue:
            job = self._queue[0]
            start_s = max(self._free_s, job.queued_s)
            if start_s >= self.now_s:
                return
            nbytes = min(CHUNK_BYTES, job.left_bytes)
            duration_s = nbytes / self._bandwidth + (self._latency_s if job.left_bytes == self._expert_bytes else 0.0)
            self._free_s = start_s + duration_s
            self.busy_s += duration_s
            self.speculative_bytes += nbytes
            job.left_bytes -= nbytes
            if not job.left_bytes:
                self._ready_s[job.slot] = self._free_s
                self._queue.popleft()

    def _take(self, slot: int) -> _Speculation | None:
        for job in self._queue:
            if job.slot == slot:
                self._queue.remove(job)
                return job
        return None


_NEVER = float("inf")
