"""The reference backend: numpy float32 arrays and obvious code. It defines correct; every other backend is tested against it.

T tokens of the step, D hidden, H query heads, V vocabulary, R rows whose logits are wanted, F expert width, K experts per token,
C cached positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tidegate.backends.base import Backend, Ranking
from tidegate.backends.operands import (
    AttentionWeights,
    ByteArray,
    ExpertSlots,
    F32Array,
    KvLayout,
    Linear,
    Norm,
    Router,
    Routing,
    StepBatch,
)
from tidegate.backends.reference_math import (
    F64Array,
    PackedMatrix,
    choose,
    gated_activation,
    normalize,
    ranked_margins,
    rotate,
    sigmoid,
    softmax,
)
from tidegate.experts.base import Placement
from tidegate.quant.layout import ExpertLayout
from tidegate.quant.pack import unpack
from tidegate.units import align_up

_F16_MAX = float(np.finfo(np.float16).max)


class ReferenceBackend(Backend[F32Array]):
    """Slow and clear. Unpacked weights are kept, so memory is several times that of the packed model."""

    def __init__(self) -> None:
        self._matrices: dict[int, tuple[Linear, PackedMatrix]] = {}
        self._tables: dict[int, tuple[Linear, F32Array]] = {}

    def bind_kv(self, layout: KvLayout, pages: ByteArray) -> None:
        whole = pages[: len(pages) // layout.page_bytes * layout.page_bytes]
        by_layer = whole.reshape(-1, layout.num_layers, layout.page_bytes // layout.num_layers)
        values_bytes = layout.page_tokens * KvLayout(1, layout.kv_heads, layout.v_dim, 0, layout.dtype).token_bytes
        split = by_layer.shape[2] - (values_bytes if layout.v_dim else 0)
        self._keys = _KvArea(by_layer[:, :, :split], layout, layout.k_dim, by_dimension=layout.v_dim > 0)
        if layout.v_dim:
            self._values = _KvArea(by_layer[:, :, split:], layout, layout.v_dim, by_dimension=False)
        self._page_tokens = layout.page_tokens

    def begin(self, batch: StepBatch) -> None:
        self._batch = batch

    def mark(self) -> int:
        return 0

    def release(self, mark: int) -> None:
        pass

    def embed(self, table: Linear, multiplier: float) -> F32Array:
        if id(table) not in self._tables:
            self._tables[id(table)] = table, unpack(table.packed, table.fmt, table.n, table.k)
        rows: F32Array = self._tables[id(table)][1][self._batch.token_ids_T]
        return rows * np.float32(multiplier)

    def norm(self, x: F32Array, norm: Norm) -> F32Array:
        return normalize(x, norm)

    def linear(self, x: F32Array, weight: Linear) -> F32Array:
        matrix = self._matrix(weight)
        out = matrix.wide_product(x) if weight.wide_inputs else matrix.product(x)
        return out if weight.bias is None else out + weight.bias

    def attend(self, qkv: F32Array, weights: AttentionWeights) -> F32Array:
        att, tokens = weights.config, len(qkv)
        q_width, k_width = att.num_heads * att.head_dim, att.num_kv_heads * att.head_dim
        q, k, v = np.split(qkv, [q_width, q_width + k_width], axis=1)
        if att.qk_norm == "full":
            q, k = self._normalized(q, weights.q_norm), self._normalized(k, weights.k_norm)
        q, k = q.reshape(tokens, att.num_heads, -1), k.reshape(tokens, att.num_kv_heads, -1)
        if att.qk_norm == "head":
            q, k = self._normalized(q, weights.q_norm), self._normalized(k, weights.k_norm)
        if att.clip_qkv is not None:
            q, k, v = (np.clip(part, -att.clip_qkv, att.clip_qkv) for part in (q, k, v))
        q = rotate(q, self._batch.positions_T, weights.rope, 0)
        k = rotate(k, self._batch.positions_T, weights.rope, 0)
        self._store(self._keys, weights.index, k)
        self._store(self._values, weights.index, v.reshape(tokens, att.num_kv_heads, -1))
        out = np.empty((tokens, att.num_heads, att.v_head_dim), np.float32)
        for t in range(tokens):
            keys, first = self._cached(self._keys, weights, t)
            values, _ = self._cached(self._values, weights, t, first)
            repeat = att.num_heads // att.num_kv_heads
            keys, values = np.repeat(keys, repeat, axis=0), np.repeat(values, repeat, axis=0)
            scores_HC = np.einsum("hd,hcd->hc", q[t].astype(np.float64), keys) * att.scale
            out[t] = np.einsum("hc,hcd->hd", _attention(scores_HC, weights.sinks_H), values)
        return out.reshape(tokens, -1)

    def attend_latent(self, q: F32Array, kv: F32Array, weights: AttentionWeights) -> F32Array:
        att, tokens, rank = weights.config, len(q), weights.config.kv_lora_rank
        assert weights.k_up is not None and weights.v_up is not None
        k_up, v_up = self._matrix(weights.k_up), self._matrix(weights.v_up)
        latent = self._normalized(kv[:, :rank], weights.kv_norm)
        row = np.concatenate([latent, kv[:, rank:]], axis=1)[:, None]
        self._store(self._keys, weights.index, rotate(row, self._batch.positions_T, weights.rope, rank))
        q = rotate(q.reshape(tokens, att.num_heads, -1), self._batch.positions_T, weights.rope, att.qk_nope_dim)
        absorbed = np.empty((tokens, att.num_heads, rank + weights.rope.dims), np.float32)
        absorbed[:, :, rank:] = q[:, :, att.qk_nope_dim :]
        for h in range(att.num_heads):
            rows = slice(h * rank, (h + 1) * rank)
            absorbed[:, h, :rank] = k_up.product(q[:, h, : att.qk_nope_dim], rows)
        mixed = np.empty((tokens, att.num_heads, rank), np.float32)
        for t in range(tokens):
            keys = self._cached(self._keys, weights, t)[0][0]
            scores_HC = absorbed[t].astype(np.float64) @ keys.T * att.scale
            mixed[t] = _attention(scores_HC, weights.sinks_H) @ keys[:, :rank]
        out = [
            v_up.product(mixed[:, h], slice(h * att.v_head_dim, (h + 1) * att.v_head_dim)) for h in range(att.num_heads)
        ]
        return np.concatenate(out, axis=1)

    def route(self, x: F32Array, router: Router) -> Routing:
        weights = router.weight_ED.astype(np.float64)
        logits = np.array([weights @ row for row in x.astype(np.float64)]).reshape(len(x), -1)
        if router.bias_E is not None:
            logits += router.bias_E
        chosen = choose(logits.astype(np.float32), router.correction_E, router.config)
        return Routing(*chosen, said_E=logits.mean(axis=0).astype(np.float32))

    def rank(self, scores: F32Array, top_k: int, most: int) -> Ranking:
        return ranked_margins(scores, top_k, most)

    def moe(
        self,
        x: F32Array,
        routing: Routing,
        layout: ExpertLayout,
        placements: Iterable[Placement],
        slots: ExpertSlots,
        activation: tuple[str, float, float],
    ) -> F32Array:
        ids_TK, weights_TK = routing.topk_expert_ids_TK, routing.topk_weights_TK
        pairs_TKD = np.zeros((*ids_TK.shape, layout.hidden_size), np.float32)
        for placement in placements:
            for expert, slot in zip(placement.experts, placement.slots, strict=True):
                tokens, places = np.nonzero(ids_TK == expert)
                pairs_TKD[tokens, places] = _expert(x[tokens], slots.wait(slot), layout, activation)
        out = np.zeros((len(x), layout.hidden_size), np.float32)
        for k in range(ids_TK.shape[1]):
            out += weights_TK[:, k, None] * pairs_TKD[:, k]
        return out

    def gated_mlp(self, x: F32Array, gate_up: Linear, down: Linear, activation: tuple[str, float, float]) -> F32Array:
        gate, up = np.split(self.linear(x, gate_up), 2, axis=1)
        return self.linear(gated_activation(gate, up, activation), down)

    def add(self, x: F32Array, y: F32Array, scale: float = 1.0) -> F32Array:
        x += np.float32(scale) * y
        return x

    def add_gated(self, x: F32Array, y: F32Array, gate_input: F32Array, gate: Linear) -> F32Array:
        x += sigmoid(self.linear(gate_input, gate).astype(np.float64)).astype(np.float32) * y
        return x

    def logits(self, x: F32Array, norm: Norm, head: Linear, divisor: float) -> F32Array:
        rows = normalize(x[self._batch.logit_rows_R], norm)
        return self.linear(rows, head) / np.float32(divisor)

    def _matrix(self, weight: Linear) -> PackedMatrix:
        if id(weight) not in self._matrices:
            self._matrices[id(weight)] = weight, PackedMatrix(weight.packed, weight.fmt, weight.n, weight.k)
        return self._matrices[id(weight)][1]

    @staticmethod
    def _normalized(x: F32Array, norm: Norm | None) -> F32Array:
        assert norm is not None
        return normalize(x, norm)

    def _store(self, area: _KvArea, layer: int, rows: F32Array) -> None:
        """Write [T, heads, dims] where the step's tokens belong."""
        batch = self._batch
        pages_T = batch.block_tables[batch.sequence_T, batch.positions_T // self._page_tokens]
        area.write(layer, pages_T, batch.positions_T % self._page_tokens, rows)

    def _cached(
        self, area: _KvArea, weights: AttentionWeights, t: int, first: int | None = None
    ) -> tuple[F64Array, int]:
        """What token t sees of a layer: float64 [heads, C, dims], and the first position of it."""
        position = int(self._batch.positions_T[t])
        if first is None:
            first = max(0, position + 1 - weights.window) if weights.window else 0
        count = position // self._page_tokens + 1
        pages = self._batch.block_tables[self._batch.sequence_T[t], :count]
        heads_first = np.moveaxis(area.read(weights.index, pages), 0, 1)
        flat = heads_first.reshape(heads_first.shape[0], -1, heads_first.shape[3])
        return flat[:, first : position + 1], first


class _KvArea:
    """The keys or the values of all pages, bytes [pages, layers, n], as numbers [pages, layers, heads, tokens, dims]: views."""

    def __init__(self, area: ByteArray, layout: KvLayout, dim: int, *, by_dimension: bool) -> None:
        heads, tokens = layout.kv_heads, layout.page_tokens
        by_head = area.reshape(*area.shape[:2], heads, -1)
        self._scales = None
        if layout.dtype == "int8":
            self._scales = by_head[..., tokens * dim :].view(np.float32)
            by_head = by_head[..., : tokens * dim]
        numbers = by_head.view({"f32": np.float32, "f16": np.float16, "int8": np.int8}[layout.dtype])
        shape = (dim, tokens) if by_dimension else (tokens, dim)
        numbers = numbers.reshape(*numbers.shape[:3], *shape)
        self._numbers = numbers.swapaxes(3, 4) if by_dimension else numbers

    def write(self, layer: int, pages_T: Any, slots_T: Any, rows: F32Array) -> None:
        if self._scales is not None:
            largest = np.abs(rows).max(axis=2)
            inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
            self._scales[pages_T, layer, :, slots_T] = largest / np.float32(127)
            rows = np.rint(rows * inverse[:, :, None])
        limit = _F16_MAX if self._numbers.dtype == np.float16 else np.inf
        self._numbers[pages_T, layer, :, slots_T] = np.clip(rows, -limit, limit)

    def read(self, layer: int, pages: Any) -> F64Array:
        """float64 [pages, heads, tokens, dims]."""
        numbers: F64Array = self._numbers[pages, layer].astype(np.float64)
        return numbers if self._scales is None else numbers * self._scales[pages, layer][..., None]


def _attention(scores_HC: F64Array, sinks_H: F32Array | None) -> F64Array:
    """Softmax over the cached positions; a sink takes its share and gives nothing back."""
    if sinks_H is None:
        return softmax(scores_HC)
    with_sinks = np.concatenate([scores_HC, sinks_H.astype(np.float64)[:, None]], axis=1)
    return softmax(with_sinks)[:, :-1]


def _expert(x: F32Array, blob: ByteArray, layout: ExpertLayout, activation: tuple[str, float, float]) -> F32Array:
    """One routed expert on the tokens that chose it, [t, D] -> [t, D]."""
    d, f, fmt, down_fmt = layout.hidden_size, layout.expert_dim, layout.fmt, layout.down_fmt
    up_at, down_at, bias_at = layout.up_offset, layout.down_offset, layout.bias_offset
    gate = PackedMatrix(blob[: fmt.packed_bytes(f, d)], fmt, f, d).product(x)
    up = PackedMatrix(blob[up_at : up_at + fmt.packed_bytes(f, d)], fmt, f, d).product(x)
    if layout.has_bias:
        stride = align_up(4 * f, 64)
        gate = gate + blob[bias_at : bias_at + 4 * f].view(np.float32)
        up = up + blob[bias_at + stride : bias_at + stride + 4 * f].view(np.float32)
    hidden = gated_activation(gate, up, activation)
    down = PackedMatrix(blob[down_at : down_at + down_fmt.packed_bytes(d, f)], down_fmt, d, f).product(hidden)
    if layout.has_bias:
        down = down + blob[bias_at + 2 * stride : bias_at + 2 * stride + 4 * d].view(np.float32)
    return down
