"""Errors reach whoever catches them whole, also through another process."""

import pickle
from pathlib import Path

import pytest

from tidegate import errors

CASES = [
    errors.UsageError("--context 0: at least 1"),
    errors.OverBudget("KV cache", 10, 5, "--context"),
    errors.BudgetTooSmall(1 << 20, 1 << 22, "--kv int8"),
    errors.LedgerMismatch("memory", 1, 2, "nothing"),
    errors.CorruptFile("a.gguf", 8, "checksum", "1", "2"),
    errors.ReadFailed(Path("a.gguf"), 8, 4096, 512, "Input/output error"),
    errors.DiskFull("a", 10, 5),
]


@pytest.mark.parametrize("error", CASES, ids=lambda error: type(error).__name__)
def test_an_error_survives_a_pickle(error: errors.TidegateError) -> None:
    got = pickle.loads(pickle.dumps(error))
    assert type(got) is type(error) and str(got) == str(error) and got.__dict__ == error.__dict__


def test_every_error_of_its_own_is_among_them() -> None:
    own = {kind for kind in vars(errors).values() if isinstance(kind, type) and "__init__" in vars(kind)}
    assert own <= {type(error) for error in CASES}
