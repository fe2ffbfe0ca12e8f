"""Rates of the native kernels on weights that are far larger than the caches.

T tokens, N outputs, K inputs, S slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from tidegate import _core
from tidegate.backends.base import ByteArray, F32Array
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout
from tidegate.quant.native import native_format
from tidegate.units import align_up

MATRIX_BYTES, INPUTS, WIDTH, EXPERTS = 8 << 20, 2048, 768, 8
ROUNDS, MEASURED_MACS = 12, 16 << 30  # fewer rounds where arithmetic is what takes time


class Kernels:
    """``weights``: any bytes that are ordinary numbers in every format."""

    def __init__(self, weights: ByteArray, compute: _core.Compute) -> None:
        self.weights, self._compute = weights, compute

    def reads(self) -> float:
        """Bytes a second of plain reads."""
        return self.weights.size / self._typical_s(lambda: _core.read_all(self._compute, self.weights), ROUNDS // 2)

    def dense(self, fmt: Format, tokens: int) -> float:
        """Packed bytes a second: T tokens through one matrix after the other, as large as those of real layers."""
        rows = MATRIX_BYTES * 16 // fmt.packed_bytes(16, INPUTS) // 16 * 16
        size = align_up(fmt.packed_bytes(rows, INPUTS), 4096)
        matrices = [
            _core.PackedMatrix(
                self.weights[start : start + fmt.packed_bytes(rows, INPUTS)], native_format(fmt), rows, INPUTS, None
            )
            for start in range(0, self.weights.size - size, size)
        ]
        inputs, turn = np.ones((tokens, INPUTS), np.float32), 0
        count = EXPERTS if tokens < 16 else 1

        def run() -> None:
            nonlocal turn
            x = self._compute.from_numpy(inputs)
            for number in range(count):
                _core.linear(self._compute, x, matrices[(turn + number) % len(matrices)])
            turn += count

        rounds = _rounds(tokens * count * rows * INPUTS)
        return count * fmt.packed_bytes(rows, INPUTS) / self._typical_s(run, rounds)

    def experts(self, fmt: Format, tokens: int) -> float:
        """Packed bytes a second: 8 experts that serve T tokens each, others every time."""
        layout = ExpertLayout.of(INPUTS, WIDTH, fmt, False)
        size = layout.blob_bytes
        source = _core.ReadySlots(
            [self.weights[start : start + size] for start in range(0, self.weights.size - size, size)]
        )
        slots, inputs, turn = (self.weights.size - 1) // size, np.ones((tokens, INPUTS), np.float32), 0

        def run() -> None:
            nonlocal turn
            self.moe(inputs, layout, [(turn + number) % slots for number in range(EXPERTS)], source)
            turn += EXPERTS

        return EXPERTS * size / self._typical_s(run, _rounds(3 * tokens * EXPERTS * WIDTH * INPUTS))

    def moe(self, inputs_TK: F32Array, layout: ExpertLayout, slots: list[int], source: _core.SlotSource) -> bool:
        """A layer whose every token chooses the experts in ``slots``, as the engine computes it, loads included; False if a
        load failed."""
        mark = self._compute.mark()
        ids = np.tile(np.arange(len(slots), dtype=np.int32), (len(inputs_TK), 1))
        gates = np.full(ids.shape, 1 / len(slots), np.float32)
        native = _core.ExpertLayout(
            layout.hidden_size, layout.expert_dim, native_format(layout.fmt), native_format(layout.down_fmt), False,
            layout.up_offset, layout.down_offset, layout.bias_offset,
        )  # fmt: skip
        activation = _core.ActivationParams(_core.Activation.silu, 1.0, 0.0)
        step = _core.MoeStep(self._compute, self._compute.from_numpy(inputs_TK), ids, gates, native, activation)
        went_well = step.run(range(len(slots)), slots, source) < 0
        if went_well:
            step.finish()
        self._compute.release(mark)
        return went_well

    def _typical_s(self, run: Callable[[], object], rounds: int) -> float:
        """The median, after one round that does not count."""
        found = []
        for _ in range(rounds + 1):
            mark = self._compute.mark()
            start_s = time.perf_counter()
            run()
            found.append(time.perf_counter() - start_s)
            self._compute.release(mark)
        return float(np.median(found[1:]))


def _rounds(macs: int) -> int:
    return max(3, min(ROUNDS, MEASURED_MACS // macs))
