"""Fits the gates of experts/gates_file.py: linear maps from a state to the logits of a router to come.

The first guess is what the router itself would say of the state; ridge regression shrinks towards that. How strongly is chosen,
for each gate, by what it finds on held-out text. numpy only.

T rows, L MoE layers, E experts, K experts per token, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.backends.reference_math import ranked_margins
from tidegate.experts.base import InstantLoader
from tidegate.experts.cache import ExpertCache
from tidegate.experts.gates_file import Gate, next_gate, start_gate
from tidegate.experts.lookahead import AHEAD, AT_START, DISTANCES, HALF_LIFE, LEAST_HEAT, Curve
from tidegate.experts.policy import DEFAULT_POLICY, policy_factory
from tidegate.model_config import MoeConfig
from tidegate.models.guesses import own_gate, ranking_scores
from tidegate.models.weights import MoeWeights

Array = NDArray[Any]
F32 = NDArray[np.float32]
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)  # of the mean variance of an input
_BLOCK_ROWS, _MOST_CURVE_ROWS = 2048, 400_000
Inputs = Callable[[int, slice], F32]


@dataclass
class Recall:
    """On held-out text, by distance (at the layer's start, a layer ahead): share of the used experts that are among the K named,
    with the routers' own gates and with the fitted ones, and the same of the experts that a cache of ``slots`` a layer did not
    have. ``embedded``: of the first layer, from the token alone, which is left out of the others."""

    slots: int
    own: list[float] = field(default_factory=list)
    fitted: list[float] = field(default_factory=list)
    own_misses: list[float] = field(default_factory=list)
    fitted_misses: list[float] = field(default_factory=list)
    embedded: float = 0.0


@dataclass
class FittedPredictor:
    gates: dict[str, Gate]
    curves: list[Curve]
    recall: Recall


@dataclass(frozen=True)
class _Task:
    """A gate to fit: its name, the input that it reads, the router that it speaks for, and whose norm the input went through."""

    name: str
    distance: int
    source: int
    target: MoeWeights
    norm: MoeWeights

    @property
    def reads_embedding(self) -> bool:
        return self.source == 0


def fit_gates(
    layers: Sequence[MoeWeights], moe: MoeConfig, inputs: Inputs, experts_TLK: Array, num_fitting: int
) -> FittedPredictor:
    """``inputs(i, rows)`` as RouterInputs.input; the rows from ``num_fitting`` on are held out."""
    held_out = slice(num_fitting, len(experts_TLK))
    slots = max(moe.num_experts_per_tok, moe.num_experts // 4)
    tally = _Tally(experts_TLK[held_out], slots, moe)
    gates = {}
    for task in _tasks(layers):
        start = own_gate(task.norm.norm, task.target)
        candidates = _ridges(task, start, moe, inputs, num_fitting)
        x_TD = inputs(task.source, held_out)
        found = [tally.found(task, gate, x_TD) for gate in candidates]
        best = candidates[int(np.argmax(found))]
        gates[task.name] = best
        tally.add(task, start, best, x_TD)
    return FittedPredictor(gates, tally.curves(), tally.recall(slots))


def _tasks(layers: Sequence[MoeWeights]) -> list[_Task]:
    starts = [_Task(start_gate(i), AT_START, 2 * i, one, one) for i, one in enumerate(layers)]
    return starts + [_Task(next_gate(i), AHEAD, 2 * i + 1, layers[i + 1], one) for i, one in enumerate(layers[:-1])]


def lacking(experts_TLK: Array, num_experts: int, slots: int) -> Array:
    """bool [T, L, E]: what a cache with so many slots a layer does not have when the token comes."""
    num_layers = experts_TLK.shape[1]
    cache = ExpertCache([slots] * num_layers, num_experts, policy_factory(DEFAULT_POLICY), InstantLoader())
    out = np.ones((len(experts_TLK), num_layers, num_experts), bool)
    for t, experts_LK in enumerate(experts_TLK.tolist()):
        for layer, experts in enumerate(experts_LK):
            out[t, layer, list(cache.residents(layer))] = False
            for _ in cache.visit(layer, sorted(experts)):
                pass
    return out


def _ridges(task: _Task, start: Gate, moe: MoeConfig, inputs: Inputs, num_rows: int) -> list[Gate]:
    """One gate for each of RIDGES; the start is among them as the limit of infinite shrinkage."""
    outputs, width = start.matrix_ED.shape
    sum_D, sum_E = np.zeros(width), np.zeros(outputs)
    square_DD, product_DE = np.zeros((width, width), np.float32), np.zeros((width, outputs), np.float32)
    for begin in range(0, num_rows, _BLOCK_ROWS):
        rows = slice(begin, min(num_rows, begin + _BLOCK_ROWS))
        x_TD = inputs(task.source, rows)
        rest_TE = _logits(task.target, moe, inputs, rows) - _centred(x_TD @ start.matrix_ED.T + start.bias_E, moe)
        sum_D += x_TD.sum(axis=0, dtype=np.float64)
        sum_E += rest_TE.sum(axis=0, dtype=np.float64)
        square_DD += x_TD.T @ x_TD
        product_DE += x_TD.T @ rest_TE
    mean_D, mean_E = sum_D / num_rows, sum_E / num_rows
    square_DD -= np.float32(num_rows) * np.outer(mean_D, mean_D).astype(np.float32)
    product_DE -= np.float32(num_rows) * np.outer(mean_D, mean_E).astype(np.float32)
    spread = float(np.trace(square_DD)) / width
    out = [start]
    for ridge in RIDGES:
        shrunk_DD = square_DD + np.float32(max(ridge * spread, 1e-12)) * np.eye(width, dtype=np.float32)
        correction_ED = np.linalg.solve(shrunk_DD, product_DE).T.astype(np.float32)
        bias_E = start.bias_E + (mean_E - correction_ED @ mean_D).astype(np.float32)
        out.append(Gate(start.matrix_ED + correction_ED, bias_E))
    return out


def _logits(target: MoeWeights, moe: MoeConfig, inputs: Inputs, rows: slice) -> F32:
    """[T, E]: what the target's router really said."""
    router = target.router
    logits_TE = inputs(2 * target.layer + 1, rows) @ router.weight_ED.T
    return _centred(logits_TE if router.bias_E is None else logits_TE + router.bias_E, moe)


def _centred(logits_TE: F32, moe: MoeConfig) -> F32:
    """A softmax does not see what all logits of a layer have in common, so nothing need explain it."""
    return logits_TE if moe.scoring == "sigmoid" else logits_TE - logits_TE.mean(axis=1, keepdims=True)


class _Tally:
    """What gates find on held-out text."""

    def __init__(self, experts_TLK: Array, slots: int, moe: MoeConfig) -> None:
        self._moe = moe
        self._lacking_TLE = lacking(experts_TLK, moe.num_experts, slots)
        self._hot_TLE = np.zeros(self._lacking_TLE.shape, bool)
        np.put_along_axis(self._hot_TLE, experts_TLK.astype(np.int64), True, axis=2)
        # [distance, own or fitted, all or missing, found or used]
        self._sums = np.zeros((DISTANCES, 2, 2, 2))
        self._embedded = 0.0
        self._pairs: list[list[Array]] = [[] for _ in range(DISTANCES)]

    def found(self, task: _Task, gate: Gate, x_TD: F32) -> int:
        """How many of the used experts it names."""
        return int((self._named(task, gate, x_TD) & self._hot_TLE[:, task.target.layer]).sum())

    def add(self, task: _Task, own: Gate, fitted: Gate, x_TD: F32) -> None:
        """Take a final gate in."""
        layer, moe = task.target.layer, self._moe
        hot_TE, lacking_TE = self._hot_TLE[:, layer], self._lacking_TLE[:, layer]
        for which, gate in enumerate((own, fitted)):
            named_TE = self._named(task, gate, x_TD)
            counts = [[(named_TE & used).sum(), used.sum()] for used in (hot_TE, hot_TE & lacking_TE)]
            if task.reads_embedding:
                self._embedded = float(counts[0][0] / counts[0][1])
            else:
                self._sums[task.distance, which] += counts
        most = min(2 * moe.num_experts_per_tok, moe.num_experts)
        ranked, margins = map(np.array, ranked_margins(self._scores(task, fitted, x_TD), moe.num_experts_per_tok, most))
        heat = np.take_along_axis(_heat_before(hot_TE), ranked, axis=1)
        is_used = np.take_along_axis(hot_TE, ranked, axis=1)
        pairs = np.stack([margins, np.log(heat + LEAST_HEAT), is_used], axis=2).astype(np.float32)
        self._pairs[task.distance].append(pairs[np.take_along_axis(lacking_TE, ranked, axis=1)])

    def curves(self) -> list[Curve]:
        """Logistic regression of use on margin and heat, of experts that were not in memory."""
        return [_logistic(np.concatenate(pairs)) if pairs else (1.0, 0.0, 0.0) for pairs in self._pairs]

    def recall(self, slots: int) -> Recall:
        """Of everything taken in."""
        share = self._sums[..., 0] / np.maximum(self._sums[..., 1], 1)
        own, fitted = share[:, 0], share[:, 1]
        return Recall(
            slots, own[:, 0].tolist(), fitted[:, 0].tolist(), own[:, 1].tolist(), fitted[:, 1].tolist(), self._embedded
        )

    def _scores(self, task: _Task, gate: Gate, x_TD: F32) -> F32:
        return ranking_scores(x_TD @ gate.matrix_ED.T + gate.bias_E, task.target.router.correction_E, self._moe)

    def _named(self, task: _Task, gate: Gate, x_TD: F32) -> Array:
        """bool [T, E]: the K best."""
        scores_TE, per_token = self._scores(task, gate, x_TD), self._moe.num_experts_per_tok
        top = np.argpartition(-scores_TE, per_token - 1, axis=1)
        named_TE = np.zeros(scores_TE.shape, bool)
        np.put_along_axis(named_TE, top[:, :per_token], True, axis=1)
        return named_TE


def _heat_before(hot_TE: Array) -> F32:
    """Decayed counts before each row, as Lookahead keeps them."""
    out, heat = np.zeros(hot_TE.shape, np.float32), np.zeros(hot_TE.shape[1], np.float32)
    for t, hot in enumerate(hot_TE):
        heat *= np.float32(2.0 ** (-1 / HALF_LIFE))
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
