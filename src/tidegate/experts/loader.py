"""The engine's Loader: native threads that read blobs of the expert store into slots of the arena."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tidegate import _core
from tidegate.backends.operands import ExpertSlots
from tidegate.checkpoint.reading import open_files, read_failure
from tidegate.checkpoint.store import Blob
from tidegate.errors import CorruptFile
from tidegate.experts.base import CHUNK_BYTES, ExpertKey, Loader

ByteArray = NDArray[np.uint8]


class BlobTable(Protocol):
    """What a loader needs to know of an expert store; ExpertStore is one."""

    @property
    def paths(self) -> Sequence[Path]: ...

    def blob(self, key: ExpertKey) -> Blob: ...


@dataclass(frozen=True)
class LoaderOptions:
    """``threads`` reads are in flight at once; with one, the first of several loads arrives early and is computed while the
    next comes. A load can be cancelled or overtaken every ``chunk_bytes`` (a multiple of 4096); each request costs the disk a
    pause. ``verify`` compares the checksum of every blob; ``page_cache`` keeps what was read in the kernel's cache as well."""

    threads: int = 1
    chunk_bytes: int = CHUNK_BYTES
    verify: bool = False
    page_cache: bool = False


class NativeLoader(Loader, ExpertSlots):
    """Also the backends' ExpertSlots: ``wait`` for numpy, ``native`` for native code. Close it before the slots' memory goes.

    ``slots``: one uint8 view each, of equal size, 4096-aligned for direct reads; a blob may be shorter than its slot.
    ``reader`` replaces the operating system's reads in tests. Slots keep their bytes after ``close``.
    """

    def __init__(
        self,
        table: BlobTable,
        slots: Sequence[ByteArray],
        options: LoaderOptions | None = None,
        reader: _core.BlockReader | None = None,
    ) -> None:
        options = options or LoaderOptions()
        assert slots and all(
            view.dtype == np.uint8 and view.flags.c_contiguous and view.flags.writeable and view.size == slots[0].size
            for view in slots
        )
        self._table = table
        self._views = list(slots)
        self._asked_ns = (0, time.perf_counter_ns())
        self._files = open_files(table.paths, page_cache=options.page_cache, reader=reader)
        self.native: _core.Loader = _core.Loader(
            self._files,
            [view.ctypes.data for view in slots],
            slots[0].size,
            options.threads,
            options.chunk_bytes,
            options.verify,
        )

    def load(self, key: ExpertKey, slot: int, *, demand: bool) -> None:
        blob = self._table.blob(key)
        self.native.load(slot, blob.file, blob.offset, blob.nbytes, blob.crc32, demand, key.layer, key.expert)

    def cancel(self, slot: int) -> bool:
        return self.native.cancel(slot)

    def promote(self, slot: int) -> None:
        self.native.promote(slot)

    def is_ready(self, slot: int) -> bool:
        return self.native.is_ready(slot)

    def native_loads(self, num_layers: int, num_experts: int) -> _core.ExpertLoads:
        loads = _core.ExpertLoads(self.native)
        for layer in range(num_layers):
            loads.add_layer([self._table.blob(ExpertKey(layer, expert)) for expert in range(num_experts)])
        return loads

    def wait(self, slot: int) -> ByteArray:
        """Block until the slot is ready; its bytes (a view). Raises ReadFailed or CorruptFile if the load failed."""
        if not self.native.wait(slot):
            self._raise_failure(slot)
        return self._views[slot]

    def counters(self) -> _core.LoaderCounters:
        """A snapshot of the native counters (loads, bytes, waits in ns)."""
        return self.native.counters()

    def busy_ratio(self) -> float:
        """How much of the time since the last call some read was in flight, 0 to 1 (two at once count twice, up to 1)."""
        busy_ns, now_ns = self.native.counters().busy_ns, time.perf_counter_ns()
        before_ns, self._asked_ns = self._asked_ns, (busy_ns, now_ns)
        return min(1.0, (busy_ns - before_ns[0]) / max(1, now_ns - before_ns[1]))

    def close(self) -> None:
        """Cancel what is queued or in flight and end the threads. Idempotent."""
        self.native.close()

    def _raise_failure(self, slot: int) -> None:
        if self.native.state(slot) != _core.SlotState.FAILED:
            raise RuntimeError(f"slot {slot} is waited for but was never loaded, or its load was cancelled")
        failure = self.native.failure(slot)
        path = self._table.paths[failure.file]
        if failure.got_bytes == failure.wanted_bytes:
            what = f"crc32 of expert {failure.expert} of MoE layer {failure.layer}"
            raise CorruptFile(path, failure.offset, what, f"{failure.wanted_crc32:08x}", f"{failure.got_crc32:08x}")
        raise read_failure(path, failure.offset, failure.wanted_bytes, failure.got_bytes, failure.error)
