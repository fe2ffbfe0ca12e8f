"""A loader that charges a clock: one I/O channel, demand loads first, speculative ones in the gaps.

The channel serves one load at a time (one direct read of half a megabyte saturates the disks this is made for). A demand load
waits for the demand loads before it and for the chunk in flight, as in the native loader. All times are in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tidegate.experts.base import CHUNK_BYTES, ExpertKey, Loader


@dataclass
class _Speculation:
    slot: int
    queued_s: float
    left_bytes: int


class ClockLoader(Loader):
    """``now_s`` is set by whoever simulates, and only ever grows.

    If a load finds the channel idle, reading begins ``wake_s`` later, the channel is not busy until then, and the read takes
    ``first_read_s`` longer than one that waits in the queue, which begins as soon as its turn comes. Whoever asks for a load
    spends ``miss_s`` on it and ``rouse_s`` more to wake the channel, and the computation after it takes ``strain_s`` longer;
    or all in all ``ahead_s`` if it is not needed yet.
    """

    def __init__(
        self, num_slots: int, expert_bytes: int, bandwidth_bytes_per_s: float, wake_s: float = 0.0, *,
        first_read_s: float = 0.0, rouse_s: float = 0.0, miss_s: float = 0.0, ahead_s: float = 0.0, strain_s: float = 0.0,
        load_beside_ratio: float = 1.0, compute_beside_ratio: float = 1.0,
    ) -> None:  # fmt: skip
        self.now_s = 0.0
        self._wake_s, self._first_read_s = wake_s, first_read_s
        self._rouse_s, self._miss_s, self._ahead_s, self._strain_s = rouse_s, miss_s, ahead_s, strain_s
        self._new_loads = 0
        self._load_speed, self._compute_speed = load_beside_ratio, compute_beside_ratio
        self._slow_each_other = load_beside_ratio != 1.0 or compute_beside_ratio != 1.0
        self._loading: list[int] = []  # on demand, kept only where they are slowed
        self.demand_bytes = self.speculative_bytes = 0
        self.busy_s = 0.0
        self._asked_s = (0.0, 0.0)  # busy, now
        self._ready_s = [0.0] * num_slots
        self._free_s = 0.0
        self._last_read_s = self._longer_s = 0.0
        self._expert_bytes, self._bandwidth = expert_bytes, bandwidth_bytes_per_s
        self._queue: deque[_Speculation] = deque()

    def load(self, key: ExpertKey, slot: int, *, demand: bool) -> None:
        self._catch_up()
        if is_idle := not self._queue and self._free_s <= self.now_s:
            self._free_s, self._last_read_s, self._longer_s = self.now_s + self._wake_s, 0.0, self._first_read_s
        if demand:
            self._serve(slot, self._expert_bytes)
        else:
            self._ready_s[slot] = _NEVER
            self._queue.append(_Speculation(slot, self.now_s, self._expert_bytes))
        self.now_s += self._miss_s + self._rouse_s * is_idle if demand else self._ahead_s
        self._new_loads += demand

    def strain(self) -> None:
        """The computation after the loads on demand since the last call is through."""
        self.now_s += self._new_loads * self._strain_s
        self._new_loads = 0

    def cancel(self, slot: int) -> bool:
        """A chunk that is under way still keeps the channel, as in the native loader."""
        self._catch_up()
        if self._take(slot) is None and self._ready_s[slot] <= self.now_s:
            return False
        self._ready_s[slot] = 0.0
        return True

    def promote(self, slot: int) -> None:
        self._catch_up()
        job = self._take(slot)
        if job is not None:
            self._serve(slot, job.left_bytes)

    def is_ready(self, slot: int) -> bool:
        if self._queue:
            self._catch_up()
        return self._ready_s[slot] <= self.now_s

    def compute(self, duration_s: float) -> None:
        """Let time pass with a computation that takes so long by itself. Beside loads it is slower, and so are they; loads that
        nobody asked for are taken to run beside computation all the time."""
        if not self._slow_each_other:
            self.now_s += duration_s
            return
        self._catch_up()
        speed, load_speed, start_s = self._compute_speed, self._load_speed, self.now_s
        self._loading = [slot for slot in self._loading if start_s < self._ready_s[slot] < _NEVER]
        left_s = max(0.0, self._free_s - start_s) / (load_speed if self._loading else 1.0)
        left_s += sum(job.left_bytes for job in self._queue) / (self._bandwidth * load_speed)
        both_s = min(duration_s / speed, left_s)
        if self._loading:
            self.busy_s -= self._free_s
            self._free_s = self._later(self._free_s, both_s)
            self.busy_s += self._free_s
            for slot in self._loading:
                self._ready_s[slot] = self._later(self._ready_s[slot], both_s)
        self.now_s += both_s + max(0.0, duration_s - both_s * speed)

    def _later(self, end_s: float, both_s: float) -> float:
        """When a load ends that would end then, if compute runs beside it for so long from now on."""
        left_s = end_s - self.now_s
        return self.now_s + min(left_s / self._load_speed, left_s + both_s * (1 - self._load_speed))

    def busy_ratio(self) -> float:
        """How much of the time since the last call went into reads, 0 to 1. As in the native loader a read counts when it has
        ended, and between steps there is one at most that has not."""
        self._catch_up()
        busy_s = self.busy_s - (self._last_read_s if self._free_s > self.now_s else 0.0)
        before_s, self._asked_s = self._asked_s, (busy_s, self.now_s)
        elapsed_s = self.now_s - before_s[1]
        return min(1.0, (busy_s - before_s[0]) / elapsed_s) if elapsed_s > 0 else 0.0

    def ready_s(self, slot: int) -> float:
        """When the slot's bytes are there. It must not be waiting as a speculation: demand and promoted loads only."""
        return self._ready_s[slot]

    def _serve(self, slot: int, nbytes: int) -> None:
        read_s = self._read_s(nbytes, self._bandwidth)
        self._free_s = self._ready_s[slot] = max(self._free_s, self.now_s) + read_s
        if self._slow_each_other:
            self._loading.append(slot)
        self.demand_bytes += nbytes

    def _read_s(self, nbytes: int, bytes_per_s: float) -> float:
        """The channel is busy for so long with the read that comes next."""
        read_s = self._last_read_s = self._longer_s + nbytes / bytes_per_s
        self._longer_s = 0.0
        self.busy_s += read_s
        return read_s

    def _catch_up(self) -> None:
        """Speculative chunks that began before now."""
        while self._queue:
            job = self._queue[0]
            start_s = max(self._free_s, job.queued_s)
            if start_s >= self.now_s:
                return
            nbytes = min(CHUNK_BYTES, job.left_bytes)
            self._free_s = start_s + self._read_s(nbytes, self._bandwidth * self._load_speed)
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
