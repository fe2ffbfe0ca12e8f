"""Arithmetic of the reference backend: products with packed weights, norms, activations, rotation, the routers' rules.

Plain numpy. A product with float weights is taken in float64, one token at a time, and rounded once, so a token's result
cannot depend on its batch. T tokens, N outputs, K inputs, G groups of a row, E experts, K experts per token in ``_TK``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.backends.base import LARGEST_MARGIN, Ranking
from tidegate.backends.operands import ByteArray, F32Array, I32Array, Norm, Rope
from tidegate.model_config import MoeConfig
from tidegate.quant.formats import MXFP4_VALUES, Format
from tidegate.quant.pack import unpack, unpack_codes

F64Array = NDArray[np.float64]


class PackedMatrix:
    """A packed weight [n, k], unpacked once: float64 values, or integer codes with their scales and minima or row scales."""

    def __init__(self, packed: ByteArray, fmt: Format, n: int, k: int) -> None:
        self.fmt, self.n, self.k = fmt, n, k
        if not fmt.is_integer:
            self.values_NK: F64Array = unpack(packed, fmt, n, k).astype(np.float64)
            return
        codes, scales_NG, more = unpack_codes(packed, fmt, n, k)
        table = np.array(MXFP4_VALUES) if fmt.kind == "mxfp4" else np.arange(256) - fmt.code_offset
        groups = scales_NG.shape[1]
        self.codes_GNg = _to_groups(table[codes], fmt.group).transpose(1, 0, 2)
        self.scales_GN: F32Array = scales_NG.T.astype(np.float32)
        more_GN = None if more is None else more.T.astype(np.float32)
        self.mins_GN: F32Array | None = more_GN if fmt.has_min else None
        self.row_scales_N: F32Array | None = more_GN[0] if more_GN is not None and fmt.two_level else None
        assert self.codes_GNg.shape == (groups, n, fmt.group)

    def product(self, x_TK: F32Array, rows: slice = slice(None)) -> F32Array:
        """x [T, k] times the transpose of ``rows`` of the matrix: float32 [T, rows]."""
        if self.fmt.is_integer:
            return self._integer_product(x_TK, rows)
        w_NK, x = self.values_NK[rows], x_TK.astype(np.float64)
        return np.array([w_NK @ row for row in x]).reshape(len(x), len(w_NK)).astype(np.float32)

    def wide_product(self, x_TK: F32Array) -> F32Array:
        """The product of the int8 codes of x plus the product of what they leave; float formats as in ``product``."""
        if not self.fmt.is_integer:
            return self.product(x_TK)
        codes_TGg, scales_TG = quantize_activations(x_TK, self.fmt.group)
        taken_TK = (codes_TGg.astype(np.float32) * scales_TG[:, :, None]).reshape(len(x_TK), -1)[:, : self.k]
        return self.product(x_TK) + self.product(x_TK - taken_TK)

    def _integer_product(self, x_TK: F32Array, rows: slice) -> F32Array:
        """int8 activations, integer sums within a group, then one fused multiply-add a group, as formats.py says."""
        x_codes_TGg, x_scales_TG = quantize_activations(x_TK, self.fmt.group)
        acc = np.zeros((len(x_TK), len(self.codes_GNg[0, rows])), np.float32)
        for g in range(len(self.codes_GNg)):
            dot_TN = x_codes_TGg[:, g] @ self.codes_GNg[g, rows].T
            if self.row_scales_N is not None:
                acc = _fma(dot_TN * self.scales_GN[g, rows], x_scales_TG[:, g, None], acc)
                continue
            acc = _fma(dot_TN, self.scales_GN[g, rows] * x_scales_TG[:, g, None], acc)
            if self.mins_GN is not None:
                sums_T1 = x_codes_TGg[:, g].sum(axis=1, keepdims=True)
                acc = _fma(sums_T1, self.mins_GN[g, rows] * x_scales_TG[:, g, None], acc)
        return acc if self.row_scales_N is None else acc * self.row_scales_N[rows]


def quantize_activations(x_TK: F32Array, group: int) -> tuple[NDArray[np.int64], F32Array]:
    """int8 codes [T, G, group] and float32 scales [T, G]; zeros have scale 0."""
    x_TGg = _to_groups(x_TK, group)
    scales_TG = np.abs(x_TGg).max(axis=2) / np.float32(127)
    codes = np.divide(x_TGg, scales_TG[:, :, None], out=np.zeros_like(x_TGg), where=scales_TG[:, :, None] != 0)
    return np.rint(codes).astype(np.int64), scales_TG


def _to_groups(x_NK: NDArray[Any], group: int) -> NDArray[Any]:
    """[N, K] -> [N, G, group], padded with zeros."""
    n, k = x_NK.shape
    padded = np.pad(x_NK, ((0, 0), (0, -k % group)))
    return padded.reshape(n, padded.shape[1] // group, group)


def _fma(a: NDArray[Any], b: F32Array, c: F32Array) -> F32Array:
    """float32(a * b + c) with one rounding: a * b is exact in float64 (24 bits each)."""
    result: F32Array = (a.astype(np.float64) * b + c).astype(np.float32)
    return result


def normalize(x: F32Array, norm: Norm) -> F32Array:
    """RMSNorm or LayerNorm over the last axis."""
    wide = x.astype(np.float64)
    if norm.kind == "layer":
        wide -= wide.mean(axis=-1, keepdims=True)
    wide /= np.sqrt((wide**2).mean(axis=-1, keepdims=True) + norm.eps)
    wide *= norm.weight
    if norm.bias is not None:
        wide += norm.bias
    result: F32Array = wide.astype(np.float32)
    return result


def gated_activation(gate: F32Array, up: F32Array, activation: tuple[str, float, float]) -> F32Array:
    """act(gate) * up; gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), both clamped."""
    name, alpha, limit = activation
    g, u = gate.astype(np.float64), up.astype(np.float64)
    if name == "clamped_swiglu":
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit) + 1
        act = g * sigmoid(alpha * g)
    elif name == "silu":
        act = g * sigmoid(g)
    elif name == "gelu_tanh":
        act = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    else:
        act = 0.5 * g * (1 + _erf(g / np.sqrt(2)))
    result: F32Array = (act * u).astype(np.float32)
    return result


def sigmoid(x: F64Array) -> F64Array:
    half: F64Array = 0.5 * (1 + np.tanh(0.5 * x))
    return half


_erf = np.vectorize(math.erf, otypes=[np.float64])


def rotate(x_THd: F32Array, positions_T: I32Array, rope: Rope, start: int) -> F32Array:
    """Rotate dimensions start : start + rope.dims of every head; a copy."""
    angles_Ti = positions_T.astype(np.float32)[:, None] * rope.inv_freq
    cos = (np.cos(angles_Ti.astype(np.float64)) * rope.factor)[:, None]
    sin = (np.sin(angles_Ti.astype(np.float64)) * rope.factor)[:, None]
    out = x_THd.copy()
    part = out[:, :, start : start + rope.dims]
    half = rope.dims // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if rope.interleaved else (slice(0, half), slice(half, None))
    a, b = part[..., first].copy(), part[..., second].copy()
    part[..., first] = a * cos - b * sin
    part[..., second] = b * cos + a * sin
    return out


def softmax(x: F64Array) -> F64Array:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    total: F64Array = weights / weights.sum(axis=-1, keepdims=True)
    return total


def choose(logits_TE: F32Array, correction_E: F32Array | None, moe: MoeConfig) -> tuple[I32Array, F32Array]:
    """The router's rule: expert ids and weights, best score first, ties towards the lower id."""
    logits = logits_TE.astype(np.float64)
    if moe.scoring == "sparsemixer":
        return _sparsemixer(logits, moe.router_jitter)
    scores = _scores(logits, moe)
    ids_TK = _top(choice_scores(logits, correction_E, moe), moe.num_experts_per_tok)
    weights_TK = np.take_along_axis(scores, ids_TK, axis=1)
    if moe.scoring == "topk_softmax":
        weights_TK = softmax(weights_TK)
    if moe.normalize_topk:
        weights_TK = weights_TK / (weights_TK.sum(axis=1, keepdims=True) + 1e-20)
    return ids_TK.astype(np.int32), (weights_TK * moe.routed_scaling).astype(np.float32)


def choice_scores(logits_TE: NDArray[Any], correction_E: F32Array | None, moe: MoeConfig) -> F64Array:
    """What the router ranks by, [T, E]: -infinity for the experts of groups that are out. Not for sparsemixer."""
    scores = _scores(logits_TE.astype(np.float64), moe)
    choice = scores if correction_E is None else scores + correction_E
    return np.where(_in_best_groups(choice, moe), choice, -np.inf) if moe.num_groups > 1 else choice


def _scores(logits_TE: F64Array, moe: MoeConfig) -> F64Array:
    if moe.scoring == "topk_softmax":
        return logits_TE
    return sigmoid(logits_TE) if moe.scoring == "sigmoid" else softmax(logits_TE)


def _top(scores: F64Array, count: int) -> NDArray[np.int64]:
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def _in_best_groups(choice_TE: F64Array, moe: MoeConfig) -> NDArray[np.bool_]:
    """True for the experts of each token's best groups."""
    by_group = choice_TE.reshape(len(choice_TE), moe.num_groups, -1)
    best = 2 if moe.group_score == "top2_sum" else 1
    group_scores = np.sort(by_group, axis=2)[:, :, -best:].sum(axis=2)
    allowed = np.zeros(group_scores.shape, bool)
    np.put_along_axis(allowed, _top(group_scores, moe.topk_groups), True, axis=1)
    return np.repeat(allowed, by_group.shape[2], axis=1)


def _sparsemixer(logits_TE: F64Array, jitter: float) -> tuple[I32Array, F32Array]:
    """PhiMoE (Liu et al. 2024, inference): the best expert, then the best of the rest, each weighted by a softmax over the
    experts whose logit is within a relative 2 * jitter of it."""
    ids, weights = [], []
    open_TE = logits_TE.copy()
    for _ in range(2):
        best_T1 = open_TE.argmax(axis=1)[:, None]
        top_T1 = np.take_along_axis(open_TE, best_T1, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):  # a logit of zero below a negative one is not far
            far = (top_T1 - logits_TE) / np.maximum(np.abs(logits_TE), top_T1) > 2 * jitter
        near = softmax(np.where(far, -np.inf, open_TE))
        ids.append(best_T1)
        weights.append(np.take_along_axis(near, best_T1, axis=1))
        np.put_along_axis(open_TE, best_T1, -np.inf, axis=1)
    return np.concatenate(ids, axis=1).astype(np.int32), np.concatenate(weights, axis=1).astype(np.float32)


def ranked_margins(scores_TE: F32Array, top_k: int, most: int) -> Ranking:
    """``Backend.rank``."""
    scores_TE = scores_TE.astype(np.float64)
    ids = np.argsort(-scores_TE, axis=1, kind="stable")[:, :most]
    best = np.take_along_axis(scores_TE, ids, axis=1)
    edge_T = 0.5 * (best[:, top_k - 1] + best[:, min(top_k, most - 1)])
    margins = (best - edge_T[:, None]) / (scores_TE.std(axis=1, keepdims=True) + 1e-30)
    steps = np.rint(256 * margins.clip(-LARGEST_MARGIN, LARGEST_MARGIN))
    return ids.tolist(), (steps / 256).tolist()
