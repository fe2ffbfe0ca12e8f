"""Rates of the native kernels on weights that are far larger than the caches, and on weights that stay in the last one.

T tokens, N outputs, K inputs, S slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tidegate import _core
from tidegate.backends.operands import ByteArray, F32Array
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout
from tidegate.quant.native import native_format
from tidegate.units import align_up

EXPERTS = 8


@dataclass(frozen=True)
class Shape:
    """Of matrices and experts: bytes of a matrix, its inputs, and the width of an expert."""

    matrix_bytes: int
    inputs: int
    width: int


# Of layers of a few billion weights; of a model that fits a cache; and of one whose bytes do not count (planner/tiny_store.py).
INPUTS = 2048
LARGE, SMALL, TINY = Shape(8 << 20, INPUTS, 768), Shape(256 << 10, 256, 128), Shape(2 << 10, 64, 32)
ROUNDS, MEASURED_MACS = 12, 16 << 30  # fewer rounds where arithmetic is what takes time
CACHED_ROUNDS, MOST_MATRICES = 200, 4096


class Kernels:
    """``weights``: any bytes that are ordinary numbers in every format."""

    def __init__(self, weights: ByteArray, compute: _core.Compute) -> None:
        self.weights, self.compute = weights, compute

    def reads(self) -> float:
        """Bytes a second of plain reads."""
        return self.weights.size / self._typical_s(lambda: _core.read_all(self.compute, self.weights), ROUNDS // 2)

    def dense(self, fmt: Format, tokens: int) -> float:
        """Packed bytes a second: T tokens through one matrix after the other, as large as those of real layers."""
        nbytes, took_s = self._linear(fmt, tokens, LARGE, ROUNDS)
        return nbytes / took_s

    def experts(self, fmt: Format, tokens: int) -> float:
        """Packed bytes a second: 8 experts that serve T tokens each, others every time."""
        nbytes, took_s = self._experts(fmt, tokens, LARGE, ROUNDS)
        return nbytes / took_s

    def cached(self, fmt: Format, tokens: int, *, experts: bool) -> float:
        """Packed bytes a second of a model that has these weights in all, beyond what one takes whose bytes do not count."""
        measure = self._experts if experts else self._linear
        nbytes, took_s = measure(fmt, tokens, SMALL, CACHED_ROUNDS)
        tiny_bytes, tiny_s = measure(fmt, tokens, TINY, CACHED_ROUNDS)
        return (nbytes - tiny_bytes) / max(took_s - tiny_s, took_s / 8)

    def together_s(self) -> float:
        """A layer whose bytes do not count: what it takes the threads to work together."""
        return self._experts(Format("int8", 32), 1, TINY, CACHED_ROUNDS)[1]

    def _linear(self, fmt: Format, tokens: int, shape: Shape, rounds: int) -> tuple[int, float]:
        """Bytes of a few products and their seconds."""
        rows = max(16, shape.matrix_bytes * 16 // fmt.packed_bytes(16, shape.inputs) // 16 * 16)
        nbytes = fmt.packed_bytes(rows, shape.inputs)
        size = align_up(nbytes, 4096)
        matrices = [
            _core.PackedMatrix(self.weights[start : start + nbytes], native_format(fmt), rows, shape.inputs, None)
            for start in range(0, min(self.weights.size, MOST_MATRICES * size) - size + 1, size)
        ]
        inputs, turn = np.ones((tokens, shape.inputs), np.float32), 0
        count = EXPERTS if tokens < 16 else 1

        def run() -> None:
            nonlocal turn
            x = self.compute.from_numpy(inputs)
            for number in range(count):
                _core.linear(self.compute, x, matrices[(turn + number) % len(matrices)])
            turn += count

        return count * nbytes, self._typical_s(run, _rounds(tokens * count * rows * shape.inputs, rounds))

    def _experts(self, fmt: Format, tokens: int, shape: Shape, rounds: int) -> tuple[int, float]:
        """Bytes of the experts of a layer and their seconds."""
        layout = ExpertLayout.of(shape.inputs, shape.width, fmt, False)
        size = layout.blob_bytes
        slots = min(MOST_MATRICES, self.weights.size // size)
        source = _core.ReadySlots([self.weights[slot * size : (slot + 1) * size] for slot in range(slots)])
        inputs, turn = np.ones((tokens, shape.inputs), np.float32), 0

        def run() -> None:
            nonlocal turn
            self.moe(inputs, layout, [(turn + number) % slots for number in range(EXPERTS)], source)
            turn += EXPERTS

        macs = 3 * tokens * EXPERTS * shape.width * shape.inputs
        return EXPERTS * size, self._typical_s(run, _rounds(macs, rounds))

    def moe(self, inputs_TK: F32Array, layout: ExpertLayout, slots: list[int], source: _core.SlotSource) -> bool:
        """A layer whose every token chooses the experts in ``slots``, as the engine computes it, loads included; False if a
        load failed."""
        mark = self.compute.mark()
        ids = np.tile(np.arange(len(slots), dtype=np.int32), (len(inputs_TK), 1))
        gates = np.full(ids.shape, 1 / len(slots), np.float32)
        native = _core.ExpertLayout(
            layout.hidden_size, layout.expert_dim, native_format(layout.fmt), native_format(layout.down_fmt), False,
            layout.up_offset, layout.down_offset, layout.bias_offset,
        )  # fmt: skip
        activation = _core.ActivationParams(_core.Activation.silu, 1.0, 0.0)
        step = _core.MoeStep(self.compute, self.compute.from_numpy(inputs_TK), ids, gates, native, activation)
        went_well = step.run(range(len(slots)), slots, source) < 0
        if went_well:
            step.finish()
        self.compute.release(mark)
        return went_well

    def _typical_s(self, run: Callable[[], object], rounds: int) -> float:
        """The median, after one round that does not count."""
        found = []
        for _ in range(rounds + 1):
            mark = self.compute.mark()
            start_s = time.perf_counter()
            run()
            found.append(time.perf_counter() - start_s)
            self.compute.release(mark)
        return float(np.median(found[1:]))


def _rounds(macs: int, most: int) -> int:
    return max(3, min(most, MEASURED_MACS // macs))
