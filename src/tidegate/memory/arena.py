"""The one block of memory that dense weights, KV pages, expert slots and workspace are carved from."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidegate import _core
from tidegate.errors import OverBudget
from tidegate.memory.ledger import Account, Ledger
from tidegate.memory.probe import reset_peak
from tidegate.units import align_up

ByteArray = NDArray[np.uint8]

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True)
class Carve:
    """``nbytes`` of the arena from ``offset`` on; ``padding_bytes`` before it, for its alignment, are the owner's too."""

    owner: str
    offset: int
    nbytes: int
    padding_bytes: int


class Arena:
    """Reserved in the ledger's account "arena", then made present page by page: it either fits now or never starts.

    ``nbytes`` is rounded up to 4096. The base is aligned to 2 MiB and backed by huge pages where the kernel has them.
    Carving moves bytes from "arena" to the owner's account, so that the ledger's total is the same from the start.
    """

    _any_closed = False

    def __init__(self, ledger: Ledger, nbytes: int, threads: int | None = None) -> None:
        self.nbytes = align_up(nbytes, PAGE_BYTES)
        self.carves: list[Carve] = []
        self._ledger = ledger
        self._account = ledger.account("arena")
        self._account.reserve(self.nbytes)
        self._used_bytes = 0
        try:
            self._mapping, self._bytes = _map(self.nbytes)
            error = _core.populate(self._bytes, threads or len(os.sched_getaffinity(0)))
            if error:
                raise OSError(error, os.strerror(error))
        except OSError as error:
            self._account.release(self.nbytes)
            hint = f"the system refused the memory ({error.strerror}): use a smaller --memory"
            raise OverBudget("arena", self.nbytes, 0, hint) from error
        ledger.adopt(self)

    @property
    def free_bytes(self) -> int:
        """What is not carved yet."""
        return self.nbytes - self._used_bytes

    def carve(self, account: Account, nbytes: int, align: int = PAGE_BYTES) -> ByteArray:
        """A zeroed view of ``nbytes``, owned by ``account``, at a multiple of ``align`` (a power of two up to 2 MiB).

        Its address is ``view.ctypes.data``. Raises OverBudget when the arena has no room for it and the padding before it.
        """
        assert nbytes >= 0 and 1 <= align <= HUGE_PAGE_BYTES and align & (align - 1) == 0, (nbytes, align)
        start = align_up(self._used_bytes, align)
        padding = start - self._used_bytes
        if padding + nbytes > self.free_bytes:
            raise OverBudget(account.name, padding + nbytes, self.free_bytes, account.hint)
        self._account.move_to(account, padding + nbytes)
        self._used_bytes = start + nbytes
        self.carves.append(Carve(account.name, start, nbytes, padding))
        return self._bytes[start : start + nbytes]

    def check(self) -> None:
        """Recount: carve-outs follow each other inside the block and, with their padding and the rest, fill it."""
        end = 0
        for carve in self.carves:
            assert carve.offset == end + carve.padding_bytes, carve
            end = carve.offset + carve.nbytes
        assert end == self._used_bytes <= self.nbytes == self._bytes.size, (end, self._used_bytes, self.nbytes)
        assert self._account.reserved_bytes == self.free_bytes, (self._account.reserved_bytes, self.free_bytes)

    def close(self) -> None:
        """Give the memory back to the system and the bytes to the ledger. Idempotent. Views left over read zeros."""
        if self.nbytes == 0:
            return
        self._mapping.madvise(mmap.MADV_DONTNEED)
        for carve in self.carves:
            self._ledger.account(carve.owner).release(carve.padding_bytes + carve.nbytes)
        self._account.release(self.free_bytes)
        self._ledger.abandon(self)
        Arena._any_closed = True
        self.carves, self.nbytes, self._used_bytes, self._bytes = [], 0, 0, self._bytes[:0]

    @staticmethod
    def forget_closed() -> None:
        """If this process has closed an arena, restart the kernel's high-water mark, which is of memory that is gone.

        For the start of the next model. Not at the end of one: somebody may still want to read its peak.
        """
        if Arena._any_closed:
            reset_peak()


def _map(nbytes: int) -> tuple[mmap.mmap, ByteArray]:
    """A private anonymous mapping and the ``nbytes`` in it that start at a multiple of 2 MiB; nothing is present yet."""
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = np.frombuffer(mapping, np.uint8)
    skip = -everything.ctypes.data % HUGE_PAGE_BYTES
    return mapping, everything[skip : skip + nbytes]
