"""The book of one memory tier: every large allocation is a reservation in a named account, made before the memory is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tidegate.errors import LedgerMismatch, OverBudget
from tidegate.memory.probe import ProcessMemory, process_memory
from tidegate.units import format_bytes

RUNTIME = "runtime"
HEADROOM = "headroom"
TOLERANCE_RATIO = 0.03
# A small process strays by more than 3 % when a library allocates; that is growth, not a mistake in the book.
TOLERANCE_MIN_BYTES = 16 << 20


class Account:
    """A named owner's line in a ledger. ``hint`` tells a user which flag makes room for this owner."""

    def __init__(self, ledger: Ledger, name: str, hint: str) -> None:
        self.name, self.hint = name, hint
        self._ledger = ledger
        self._reserved_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return self._reserved_bytes

    def reserve(self, nbytes: int) -> None:
        """Take ``nbytes`` of what is free. Raises OverBudget, with nothing changed."""
        assert nbytes >= 0
        if nbytes > self._ledger.free_bytes:
            raise OverBudget(self.name, nbytes, self._ledger.free_bytes, self.hint)
        self._ledger.post(self, nbytes)

    def release(self, nbytes: int) -> None:
        """Give back what was reserved."""
        assert 0 <= nbytes <= self._reserved_bytes, (self.name, nbytes, self._reserved_bytes)
        self._ledger.post(self, -nbytes)

    def move_to(self, other: Account, nbytes: int) -> None:
        """Hand ``nbytes`` of this account to another one of the same ledger; the total stays."""
        self.release(nbytes)
        other._ledger.post(other, nbytes)


class CarvedBlock(Protocol):
    """One block that accounts were carved from; recounts itself for ``Ledger.check``."""

    def check(self) -> None:
        """AssertionError if carve-outs overlap, leave the block, or do not add up."""


@dataclass(frozen=True)
class Recount:
    """What ``Ledger.check`` found: the book before it learned the runtime's growth, and the kernel's figure."""

    booked_bytes: int
    measured_bytes: int

    @property
    def error_ratio(self) -> float:
        return abs(self.booked_bytes - self.measured_bytes) / self.measured_bytes


class Ledger:
    """Book of ``tier``. ``limit_bytes`` is the budget; ``headroom_bytes`` of it is nobody's, for growth of the runtime.

    The account "runtime" is everything that was not allocated through an account (interpreter, libraries, heap). It is
    measured, not computed: reserve what ``process_memory`` says before the first large allocation, call ``settle`` when
    everything that a start brings is there, and ``check`` from then on.
    """

    def __init__(self, limit_bytes: int, headroom_bytes: int = 0, tier: str = "host") -> None:
        self.tier, self.limit_bytes = tier, limit_bytes
        self._accounts: dict[str, Account] = {}
        self._blocks: list[CarvedBlock] = []
        self._posted_bytes = 0
        self.runtime = self.account(RUNTIME)
        self.headroom = self.account(HEADROOM)
        self.headroom.reserve(headroom_bytes)

    def account(self, name: str, hint: str = "raise --memory") -> Account:
        """The account of that name, opened if there is none yet."""
        return self._accounts.setdefault(name, Account(self, name, hint))

    def accounts(self) -> dict[str, int]:
        """Reserved bytes by name, headroom included; they and ``free_bytes`` add up to the limit."""
        return {name: account.reserved_bytes for name, account in self._accounts.items()}

    @property
    def total_bytes(self) -> int:
        """Everything reserved but the headroom: what the process is expected to have touched at its peak."""
        return self._posted_bytes - self.headroom.reserved_bytes

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self._posted_bytes

    def post(self, account: Account, change_bytes: int) -> None:
        """One entry of the book. For Account; callers reserve, release and move."""
        account._reserved_bytes += change_bytes
        self._posted_bytes += change_bytes

    def adopt(self, block: CarvedBlock) -> None:
        """``check`` recounts this block as well."""
        self._blocks.append(block)

    def abandon(self, block: CarvedBlock) -> None:
        """The block is gone."""
        self._blocks.remove(block)

    def settle(self, process: ProcessMemory | None = None) -> None:
        """Set the runtime's account to what the kernel's high-water mark leaves after all other accounts.

        Growth comes out of the headroom, then out of what is free; what is not needed becomes headroom. Raises OverBudget
        if the process has outgrown the budget.
        """
        peak_bytes = (process or process_memory()).peak_rss_bytes
        growth = peak_bytes - self.total_bytes
        if growth <= 0:
            self.runtime.move_to(self.headroom, min(-growth, self.runtime.reserved_bytes))
            return
        spare = self.headroom.reserved_bytes
        if growth > spare + self.free_bytes:
            raise OverBudget(RUNTIME, growth, spare + self.free_bytes, "raise --memory")
        self.headroom.move_to(self.runtime, min(growth, spare))
        self.runtime.reserve(growth - min(growth, spare))

    def check(self, process: ProcessMemory | None = None, tolerance_ratio: float = TOLERANCE_RATIO) -> Recount:
        """Recount everything, compare with the kernel, then ``settle``.

        Raises LedgerMismatch when the total and the high-water mark differ by more than ``tolerance_ratio`` of the mark
        (or 16 MiB, if that is more), OverBudget as ``settle`` does, AssertionError when the book contradicts itself.
        """
        assert sum(self.accounts().values()) == self._posted_bytes, self.accounts()
        assert all(reserved >= 0 for reserved in self.accounts().values()), self.accounts()
        assert self.free_bytes >= 0, (self.limit_bytes, self.accounts())
        for block in self._blocks:
            block.check()
        process = process or process_memory()
        recount = Recount(self.total_bytes, process.peak_rss_bytes)
        allowed = max(int(tolerance_ratio * recount.measured_bytes), TOLERANCE_MIN_BYTES)
        if abs(recount.booked_bytes - recount.measured_bytes) > allowed:
            lines = ", ".join(f"{name} {format_bytes(reserved)}" for name, reserved in self.accounts().items())
            raise LedgerMismatch(self.tier, recount.booked_bytes, recount.measured_bytes, lines)
        self.settle(process)
        return recount
