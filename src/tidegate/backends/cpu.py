"""The CPU backend: thin calls into the native core (csrc/). Arrays are ``_core.Matrix`` handles into one workspace.

Instruction sets are chosen at run time; the environment variable ``TIDEGATE_ISA`` (avx512, avx2, portable) forces one.
"""

from __future__ import annotations

import os

import numpy as np

from tidegate import _core
from tidegate.backends.cpu_attention import AttentionOps
from tidegate.backends.operands import ByteArray, F32Array, StepBatch
from tidegate.errors import UsageError


class CpuBackend(AttentionOps):
    """``threads`` includes the calling thread. ``workspace`` (uint8, 64-byte aligned) holds every array of a step; an
    operation that does not fit raises OverBudget."""

    def __init__(self, threads: int, workspace: ByteArray, isa: str | None = None) -> None:
        compute = _core.Compute(threads, workspace, _choose_isa(isa or os.environ.get("TIDEGATE_ISA")))
        super().__init__(compute)
        self.workspace_bytes = workspace.size

    def begin(self, batch: StepBatch) -> None:
        self._batch = batch
        self.compute.release(0)
        self._begin_attention(batch)

    def mark(self) -> int:
        return self.compute.mark()

    def release(self, mark: int) -> None:
        self.compute.release(mark)

    def numpy(self, x: _core.Matrix) -> F32Array:
        return np.array(self.view(x))

    def view(self, x: _core.Matrix) -> F32Array:
        return self.compute.numpy(x)

    @property
    def workspace_peak_bytes(self) -> int:
        """The most that was ever in use."""
        return self.compute.peak_bytes


def _choose_isa(asked: str | None) -> str:
    available = _core.available_isas()
    if not asked:
        return available[0]
    if asked not in available:
        raise UsageError(f"TIDEGATE_ISA={asked}: this processor and build can run {', '.join(available)}")
    return asked
