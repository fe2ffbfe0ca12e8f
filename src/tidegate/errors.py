"""Every error a user can meet, as one tree. Messages say what, where, asked, allowed, and which flag helps."""

from __future__ import annotations

from pathlib import Path


class TidegateError(Exception):
    """Root of the tree. The CLI prints the message as one line and exits with ``exit_code``."""

    exit_code = 1

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross processes whole, whatever they are made from."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[TidegateError], args: tuple[object, ...], state: dict[str, object]) -> TidegateError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class UsageError(TidegateError):
    """A flag, a value or a combination of them that cannot work."""

    exit_code = 2


class OverBudget(TidegateError):
    """A reservation that the memory budget does not allow."""

    exit_code = 2

    def __init__(self, owner: str, asked_bytes: int, free_bytes: int, hint: str) -> None:
        self.owner, self.asked_bytes, self.free_bytes = owner, asked_bytes, free_bytes
        super().__init__(f"over budget: {owner} asked for {asked_bytes:,} B, {free_bytes:,} B are free; {hint}")


class BudgetTooSmall(OverBudget):
    """The whole plan does not fit. Raised before any weight is read."""

    def __init__(self, budget_bytes: int, smallest_bytes: int, hint: str) -> None:
        self.budget_bytes, self.smallest_bytes = budget_bytes, smallest_bytes
        missing = smallest_bytes - budget_bytes
        super().__init__("plan", smallest_bytes, budget_bytes, hint)
        self.args = (
            f"--memory {budget_bytes:,} B is too small by {missing:,} B; "
            f"the smallest budget that works is {smallest_bytes:,} B, --memory {-(-smallest_bytes >> 20)}MiB ({hint})",
        )


class LedgerMismatch(TidegateError):
    """The ledger and the kernel disagree about this process: somebody uses memory that was never reserved, or reserved
    memory that nobody uses. Our bug, but one that a user can meet."""

    def __init__(self, tier: str, booked_bytes: int, measured_bytes: int, accounts: str) -> None:
        self.booked_bytes, self.measured_bytes = booked_bytes, measured_bytes
        super().__init__(
            f"the ledger of {tier} has {booked_bytes:,} B, the kernel says {measured_bytes:,} B ({accounts}); "
            "please report this"
        )


class CheckpointError(TidegateError):
    """A checkpoint, GGUF file or store that cannot be used as it is."""


class UnknownArchitecture(CheckpointError):
    """The config names a model family that Tidegate does not implement."""


class BadTensor(CheckpointError):
    """A tensor with a wrong shape or dtype, or one that is missing."""


class CorruptFile(CheckpointError):
    """A header or a blob that contradicts itself or its checksum."""

    def __init__(self, path: Path | str, offset: int, what: str, wanted: object, got: object) -> None:
        self.path, self.offset = Path(path), offset
        super().__init__(f"{path}: {what} at offset {offset:,}: wanted {wanted}, got {got}")


class ReadFailed(CheckpointError):
    """A read that ended short or with an error of the operating system."""

    def __init__(self, path: Path | str, offset: int, wanted_bytes: int, got_bytes: int, reason: str = "") -> None:
        self.path, self.offset, self.wanted_bytes, self.got_bytes = Path(path), offset, wanted_bytes, got_bytes
        why = f" ({reason})" if reason else ""
        super().__init__(f"{path}: read at offset {offset:,}: wanted {wanted_bytes:,} bytes, got {got_bytes:,}{why}")


class DiskFull(TidegateError):
    """Not enough room where a store is to be written."""

    def __init__(self, path: Path | str, needed_bytes: int, free_bytes: int) -> None:
        self.path, self.needed_bytes, self.free_bytes = Path(path), needed_bytes, free_bytes
        super().__init__(
            f"{path}: needs {needed_bytes:,} B of disk, {free_bytes:,} B are free; "
            "free some space, choose another folder (DST or TIDEGATE_CACHE), or use fewer bits (--experts int4)"
        )
