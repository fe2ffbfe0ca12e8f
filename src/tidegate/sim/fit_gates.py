"""Fits the predictor of experts/gates_file.py: for every source a linear map to the router logits of the next two layers.

The start is what the routers themselves would say of the source; ridge regression shrinks towards that. How strongly is chosen,
for each source, by what it finds on held-out text. numpy only.

T rows, L MoE layers, E experts, K experts per token, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.backends.base import Norm
from tidegate.experts.cache import ExpertCache
from tidegate.experts.gates_file import Gate
from tidegate.experts.lookahead import FADE, LARGEST_MARGIN, LEAST_HEAT, REACH, Curve
from tidegate.experts.policy import DEFAULT_POLICY, policy_factory
from tidegate.model_config import MoeConfig
from tidegate.models.guesses import has_rule, ranked_margins, ranking_scores
from tidegate.models.weights import MoeWeights
from tidegate.sim.replay import InstantLoader

Array = NDArray[Any]
F32 = NDArray[np.float32]
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)  # of the mean variance of an input
_BLOCK_ROWS, _MOST_CURVE_ROWS = 2048, 400_000
Inputs = Callable[[int, slice], F32]


@dataclass
class Recall:
    """On held-out text, by distance: share of the used experts that are among the K named, with the routers' own gates and with
    the fitted ones, and the same of the experts that a cache of ``slots`` a layer did not have. Distance 1 from the embedded
    tokens is layer 0."""

    slots: int
    own: list[float] = field(default_factory=list)
    fitted: list[float] = field(default_factory=list)
    own_misses: list[float] = field(default_factory=list)
    fitted_misses: list[float] = field(default_factory=list)
    embedded: list[float] = field(default_factory=list)


@dataclass
class FittedPredictor:
    gates: list[Gate]
    curves: list[Curve]
    recall: Recall


def fit_gates(
    layers: Sequence[MoeWeights], moe: MoeConfig, inputs: Inputs, experts_TLK: Array, num_fitting: int
) -> FittedPredictor:
    """``inputs(i, rows)`` as RouterInputs.input; the rows from ``num_fitting`` on are held out."""
    held_out = slice(num_fitting, len(experts_TLK))
    truth_TLK = experts_TLK[held_out]
    slots = max(moe.num_experts_per_tok, moe.num_experts // 4)
    missed_TLE = misses(truth_TLK, moe.num_experts, slots)
    tally = _Tally(truth_TLK, missed_TLE, moe)
    gates = []
    for source in range(len(layers)):
        targets = layers[source : source + REACH]
        start = _own_gates(layers[max(0, source - 1)].norm, targets)
        candidates = _ridges(source, start, targets, moe, inputs, num_fitting)
        x_TD = inputs(source, held_out)
        found = [tally.found(source, gate, x_TD, targets) for gate in candidates]
        best = candidates[int(np.argmax(found))]
        best = _unit_spread(best, x_TD, len(targets)) if not has_rule(moe) else best
        gates.append(best)
        tally.add(source, start, best, x_TD, targets)
    curves = tally.curves()
    if not has_rule(moe):
        factors = [max(curve[0], 1e-3) for curve in curves]
        gates = [_scaled(gate, np.array(factors[: len(gate.bias_N) // moe.num_experts])) for gate in gates]
        curves = [(a / factor, b, c) for (a, b, c), factor in zip(curves, factors, strict=True)]
    return FittedPredictor(gates, curves, tally.recall(slots))


def misses(experts_TLK: Array, num_experts: int, slots: int) -> Array:
    """bool [T, L, E]: what a cache with so many slots a layer did not have."""
    num_layers = experts_TLK.shape[1]
    cache = ExpertCache([slots] * num_layers, num_experts, policy_factory(DEFAULT_POLICY), InstantLoader())
    out = np.zeros((len(experts_TLK), num_layers, num_experts), bool)
    for t, experts_LK in enumerate(experts_TLK.tolist()):
        for layer, experts in enumerate(experts_LK):
            out[t, layer, [one for one in experts if not cache.is_resident(layer, one)]] = True
            for _ in cache.visit(layer, sorted(experts)):
                pass
    return out


def _own_gates(norm: Norm, targets: Sequence[MoeWeights]) -> Gate:
    """The targets' routers as functions of a source that went through ``norm`` instead of theirs."""
    small = np.abs(norm.weight) < 1e-3 * np.abs(norm.weight).max()
    matrices, biases = [], []
    for target in targets:
        ratio_D = np.where(small, 0, target.norm.weight / np.where(small, 1, norm.weight))
        shift_D = (0 if target.norm.bias is None else target.norm.bias) - ratio_D * (
            0 if norm.bias is None else norm.bias
        )
        weight_ED, bias_E = target.router.weight_ED, target.router.bias_E
        matrices.append(weight_ED * ratio_D)
        biases.append(weight_ED @ shift_D + (0 if bias_E is None else bias_E))
    return Gate(np.concatenate(matrices).astype(np.float32), np.concatenate(biases).astype(np.float32))


def _ridges(
    source: int, start: Gate, targets: Sequence[MoeWeights], moe: MoeConfig, inputs: Inputs, num_rows: int
) -> list[Gate]:
    """One gate for each of RIDGES; the start is among them as the limit of infinite shrinkage."""
    width, outputs = start.matrix_ND.shape[1], len(start.bias_N)
    sum_D, sum_N = np.zeros(width), np.zeros(outputs)
    square_DD, product_DN = np.zeros((width, width), np.float32), np.zeros((width, outputs), np.float32)
    for begin in range(0, num_rows, _BLOCK_ROWS):
        rows = slice(begin, min(num_rows, begin + _BLOCK_ROWS))
        x_TD = inputs(source, rows)
        rest_TN = _logits(source, targets, moe, inputs, rows) - _centred(x_TD @ start.matrix_ND.T + start.bias_N, moe)
        sum_D += x_TD.sum(axis=0, dtype=np.float64)
        sum_N += rest_TN.sum(axis=0, dtype=np.float64)
        square_DD += x_TD.T @ x_TD
        product_DN += x_TD.T @ rest_TN
    mean_D, mean_N = sum_D / num_rows, sum_N / num_rows
    square_DD -= np.float32(num_rows) * np.outer(mean_D, mean_D).astype(np.float32)
    product_DN -= np.float32(num_rows) * np.outer(mean_D, mean_N).astype(np.float32)
    spread = float(np.trace(square_DD)) / width
    out = [start]
    for ridge in RIDGES:
        shrunk_DD = square_DD + np.float32(max(ridge * spread, 1e-12)) * np.eye(width, dtype=np.float32)
        correction_ND = np.linalg.solve(shrunk_DD, product_DN).T.astype(np.float32)
        bias_N = start.bias_N + (mean_N - correction_ND @ mean_D).astype(np.float32)
        out.append(Gate(start.matrix_ND + correction_ND, bias_N))
    return out


def _logits(source: int, targets: Sequence[MoeWeights], moe: MoeConfig, inputs: Inputs, rows: slice) -> F32:
    """[T, N]: what the targets' routers really said."""
    parts = []
    for index, target in enumerate(targets):
        router = target.router
        logits_TE = inputs(source + index + 1, rows) @ router.weight_ED.T
        parts.append(logits_TE if router.bias_E is None else logits_TE + router.bias_E)
    return _centred(np.concatenate(parts, axis=1), moe)


def _centred(logits_TN: F32, moe: MoeConfig) -> F32:
    """A softmax does not see what all logits of a layer have in common, so nothing need explain it."""
    if moe.scoring == "sigmoid":
        return logits_TN
    by_layer = logits_TN.reshape(len(logits_TN), -1, moe.num_experts)
    centred: F32 = (by_layer - by_layer.mean(axis=2, keepdims=True)).reshape(logits_TN.shape)
    return centred


def _unit_spread(gate: Gate, x_TD: F32, num_targets: int) -> Gate:
    """Scaled so that the scores of each layer have deviation 1: margins of all layers then mean the same."""
    scores_TN = x_TD @ gate.matrix_ND.T + gate.bias_N
    parts = scores_TN.reshape(len(x_TD), num_targets, -1)
    spread = np.maximum((parts - parts.mean(axis=2, keepdims=True)).std(axis=(0, 2)), 1e-6)
    return _scaled(gate, 1 / spread)


def _scaled(gate: Gate, factors: Array) -> Gate:
    """One factor for each layer that it speaks of."""
    scale_N = np.repeat(factors, len(gate.bias_N) // len(factors)).astype(np.float32)
    return Gate(gate.matrix_ND * scale_N[:, None], gate.bias_N * scale_N)


class _Tally:
    """What gates find on held-out rows, and pairs of evidence and truth for the curves."""

    def __init__(self, truth_TLK: Array, missed_TLE: Array, moe: MoeConfig) -> None:
        self._moe, self._missed_TLE = moe, missed_TLE
        self._hot_TLE = np.zeros(missed_TLE.shape, bool)
        np.put_along_axis(self._hot_TLE, truth_TLK.astype(np.int64), True, axis=2)
        self._sums = np.zeros((REACH, 2, 2, 2))  # distance, own or fitted, all or missed, found and asked
        self._embedded: list[float] = []
        self._pairs: list[list[Array]] = [[] for _ in range(REACH)]

    def found(self, source: int, gate: Gate, x_TD: F32, targets: Sequence[MoeWeights]) -> int:
        """How many of the used experts it names."""
        named = self._named(source, gate, x_TD, targets)
        return sum(int((ids & self._hot_TLE[:, source + i]).sum()) for i, ids in enumerate(named))

    def add(self, source: int, own: Gate, fitted: Gate, x_TD: F32, targets: Sequence[MoeWeights]) -> None:
        """Take a source's final gate in."""
        for which, gate in enumerate((own, fitted)):
            for index, named_TE in enumerate(self._named(source, gate, x_TD, targets)):
                hot_TE, missed_TE = self._hot_TLE[:, source + index], self._missed_TLE[:, source + index]
                counts = [[(named_TE & used).sum(), used.sum()] for used in (hot_TE, missed_TE)]
                if source:
                    self._sums[index, which] += counts
                elif which:
                    self._embedded.append(float(counts[0][0] / counts[0][1]))
        most = min(2 * self._moe.num_experts_per_tok, self._moe.num_experts)
        for index, scores_TE in enumerate(self._scores(fitted, x_TD, targets)):
            ids, margins = ranked_margins(scores_TE, self._moe.num_experts_per_tok, most)
            hot_TE = self._hot_TLE[:, source + index]
            heat = np.take_along_axis(_heat_before(hot_TE), ids, axis=1)
            columns = (margins.clip(-LARGEST_MARGIN, LARGEST_MARGIN), np.log(heat + LEAST_HEAT))
            pairs = np.stack([*columns, np.take_along_axis(hot_TE, ids, axis=1)], axis=2).reshape(-1, 3)
            self._pairs[index].append(pairs.astype(np.float32))

    def curves(self) -> list[Curve]:
        """Logistic regression of use on margin and heat."""
        return [_logistic(np.concatenate(pairs)) if pairs else (1.0, 0.0, 0.0) for pairs in self._pairs]

    def recall(self, slots: int) -> Recall:
        """Of everything taken in."""
        share = self._sums[..., 0] / np.maximum(self._sums[..., 1], 1)
        own, fitted = share[:, 0], share[:, 1]
        return Recall(
            slots, own[:, 0].tolist(), fitted[:, 0].tolist(), own[:, 1].tolist(), fitted[:, 1].tolist(), self._embedded
        )

    def _scores(self, gate: Gate, x_TD: F32, targets: Sequence[MoeWeights]) -> list[F32]:
        parts = np.split(x_TD @ gate.matrix_ND.T + gate.bias_N, len(targets), axis=1)
        return [ranking_scores(part, t.router.correction_E, self._moe) for part, t in zip(parts, targets, strict=True)]

    def _named(self, source: int, gate: Gate, x_TD: F32, targets: Sequence[MoeWeights]) -> list[Array]:
        """bool [T, E] for each target: the K best."""
        out = []
        for scores_TE in self._scores(gate, x_TD, targets):
            top = np.argpartition(-scores_TE, self._moe.num_experts_per_tok - 1, axis=1)
            named_TE = np.zeros(scores_TE.shape, bool)
            np.put_along_axis(named_TE, top[:, : self._moe.num_experts_per_tok], True, axis=1)
            out.append(named_TE)
        return out


def _heat_before(hot_TE: Array) -> F32:
    """Decayed counts before each row, as Lookahead keeps them."""
    out, heat = np.zeros(hot_TE.shape, np.float32), np.zeros(hot_TE.shape[1], np.float32)
    for t, hot in enumerate(hot_TE):
        heat *= np.float32(FADE)
        out[t] = heat
        heat += hot
    return out


def _logistic(pairs: Array, steps: int = 20) -> Curve:
    """Newton's method; rows are two features and the truth."""
    every = -(-len(pairs) // _MOST_CURVE_ROWS)
    rows = pairs[::every].astype(np.float64)
    x = np.concatenate([rows[:, :2], np.ones((len(rows), 1))], axis=1)
    weights = np.zeros(3)
    for _ in range(steps):
        odds = 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))
        hessian = (x.T * (odds * (1 - odds))) @ x + (1e-6 * len(x) + 1e-3) * np.eye(3)
        weights -= np.linalg.solve(hessian, x.T @ (odds - rows[:, 2]) + (1e-6 * len(x)) * weights)
    return float(weights[0]), float(weights[1]), float(weights[2])
