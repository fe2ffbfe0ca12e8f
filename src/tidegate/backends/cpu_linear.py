"""Products with packed weights, experts, and element-wise operations of the CPU backend."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from tidegate import _core
from tidegate._core import Matrix
from tidegate.backends.base import Backend
from tidegate.backends.handles import kept
from tidegate.backends.operands import ExpertSlots, F32Array, Linear, Norm, Routing, StepBatch
from tidegate.experts.base import Placement
from tidegate.quant.layout import ExpertLayout
from tidegate.quant.native import native_format


class LinearOps(Backend[Matrix]):
    """Part of CpuBackend. ``packed`` gives the native handle of a weight."""

    def __init__(self, compute: _core.Compute) -> None:
        self.compute = compute
        self.packed = kept(_packed_matrix)
        self._layout = kept(_expert_layout)
        self._batch: StepBatch

    def embed(self, table: Linear, multiplier: float) -> Matrix:
        return _core.embed(self.compute, self.packed(table), self._batch.token_ids_T, multiplier)

    def linear(self, x: Matrix, weight: Linear) -> Matrix:
        return _core.linear(self.compute, x, self.packed(weight))

    def moe(
        self,
        x: Matrix,
        routing: Routing,
        layout: ExpertLayout,
        placements: Iterable[Placement],
        slots: ExpertSlots,
        activation: tuple[str, float, float],
    ) -> Matrix:
        step = _core.MoeStep(
            self.compute,
            x,
            routing.topk_expert_ids_TK,
            routing.topk_weights_TK,
            self._layout(layout),
            native_activation(activation),
        )
        for placement in placements:
            if slots.native is None:
                source = _core.ReadySlots([slots.wait(slot) for slot in placement.slots])
                step.run(placement.experts, range(len(placement.slots)), source)
                continue
            failed = step.run(placement.experts, placement.slots, slots.native)
            if failed >= 0:
                slots.wait(failed)
                raise AssertionError(f"the load into slot {failed} failed, but wait() does not say why")
        return step.finish()

    def gated_mlp(self, x: Matrix, gate_up: Linear, down: Linear, activation: tuple[str, float, float]) -> Matrix:
        params = native_activation(activation)
        return _core.gated_mlp(self.compute, x, self.packed(gate_up), self.packed(down), params)

    def add(self, x: Matrix, y: Matrix, scale: float = 1.0) -> Matrix:
        _core.add(self.compute, x, y, scale)
        return x

    def add_gated(self, x: Matrix, y: Matrix, gate_input: Matrix, gate: Linear) -> Matrix:
        mark = self.compute.mark()
        _core.add_gated(self.compute, x, y, self.linear(gate_input, gate))
        self.compute.release(mark)
        return x

    def logits(self, x: Matrix, norm: Norm, head: Linear, divisor: float) -> F32Array:
        rows = _core.gather_rows(self.compute, x, self._batch.logit_rows_R)
        out = self.linear(self.norm(rows, norm), head)
        if divisor != 1:
            _core.divide(self.compute, out, divisor)
        return self.compute.numpy(out)


def _packed_matrix(weight: Linear) -> _core.PackedMatrix:
    fmt = native_format(weight.fmt)
    return _core.PackedMatrix(weight.packed, fmt, weight.n, weight.k, weight.bias, weight.wide_inputs)


def _expert_layout(layout: ExpertLayout) -> _core.ExpertLayout:
    return _core.ExpertLayout(
        layout.hidden_size,
        layout.expert_dim,
        native_format(layout.fmt),
        native_format(layout.down_fmt),
        layout.has_bias,
        layout.up_offset,
        layout.down_offset,
        layout.bias_offset,
    )


@cache
def native_activation(activation: tuple[str, float, float]) -> _core.ActivationParams:
    """The native twin of (name, alpha, limit) of ModelConfig."""
    name, alpha, limit = activation
    return _core.ActivationParams(_core.Activation[name], alpha, limit)
