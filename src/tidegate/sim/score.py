"""How good a predictor is, on sequences that it was not fitted to.

For every layer of every held-out token the predictor is asked when the router ``lookahead`` layers before has spoken.

Legend: T rows, E experts of a layer, K experts per token.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tidegate.experts.base import InstantLoader
from tidegate.experts.cache import ExpertCache
from tidegate.experts.policy import PolicyFactory
from tidegate.experts.predictor import Predictor
from tidegate.sim.rows import Array, Rows

_BINS = 10


@dataclass
class Score:
    """``recall[m]``: share of the used experts that are among the m most probable. ``precision``: share of the K most
    probable that were used. ``top_guess``: how often the most probable one was used. ``miss_recall[m]``: of the experts that
    the cache did not have, the share among the m most probable of those it did not have. ``wasted[m]``: of the loads that
    issuing those m would make, the share that is not needed. ``calibration_error``: mean distance of stated and
    observed frequency. ``predict_us`` is the processor time of one call."""

    recall: dict[int, float] = field(default_factory=dict)
    miss_recall: dict[int, float] = field(default_factory=dict)
    wasted: dict[int, float] = field(default_factory=dict)
    precision: float = 0.0
    top_guess: float = 0.0
    calibration_error: float = 0.0
    predict_us: float = 0.0
    lookahead: int = 1
    tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Tally:
    """Sums behind a Score. ``at_m[m]``: found, found among misses, issued."""

    used: int = 0
    missed: int = 0
    events: int = 0
    first: int = 0
    top_k: int = 0
    at_m: dict[int, list[int]] = field(default_factory=dict)
    bins: Array = field(default_factory=lambda: np.zeros((_BINS, 3)))


def score_predictor(
    predictor: Predictor,
    rows: Rows,
    make_policy: PolicyFactory,
    capacity: int,
    *,
    lookahead: int = 1,
    most_tokens: int = 1000,
    ms: tuple[int, ...] = (1, 2, 4, 8),
) -> Score:
    """Recall on the misses is that of a demand-only cache with ``capacity`` slots a layer. The first ``lookahead`` layers of a
    token have no layer before them and are asked at the token's start."""
    num_layers = rows.num_layers
    cache = ExpertCache([capacity] * num_layers, rows.num_experts, make_policy, InstantLoader())
    tally = _Tally(at_m={m: [0, 0, 0] for m in ms})
    spent_ns = calls = 0
    sequence_T = np.repeat(np.array(rows.ids), np.diff(rows.offsets))
    for t in range(min(most_tokens, len(rows.token_T))):
        predictor.begin_step([int(sequence_T[t])], [int(rows.token_T[t])])
        said: dict[int, Array] = {}
        for layer in range(-1, num_layers):
            if layer >= 0:
                needed = sorted(rows.experts_TLK[t, layer].tolist())
                _count(tally, said.pop(layer), needed, cache.resident(layer))
                for _ in cache.visit(layer, needed):
                    pass
                if rows.sketch_TLS.shape[2]:
                    predictor.observe_sketch(layer, rows.sketch_TLS[t : t + 1, layer])
                predictor.observe(layer, rows.experts_TLK[t : t + 1, layer])
            targets = (
                range(min(lookahead, num_layers)) if layer < 0 else range(layer + lookahead, layer + lookahead + 1)
            )
            for target in targets:
                if target < num_layers:
                    began_ns = time.thread_time_ns()
                    probability_E = predictor.predict(target)
                    spent_ns += time.thread_time_ns() - began_ns
                    calls += 1
                    said[target] = np.array(probability_E)
    return _score(
        tally, spent_ns / 1e3 / calls, lookahead, min(most_tokens, len(rows.token_T)), rows.num_experts_per_tok
    )


def _count(tally: _Tally, probability_E: Array, needed: list[int], resident: frozenset[int]) -> None:
    order = np.argsort(-probability_E, kind="stable").tolist()
    absent = [expert for expert in order if expert not in resident]
    truth = set(needed)
    misses = truth - resident
    tally.events += 1
    tally.used += len(truth)
    tally.missed += len(misses)
    tally.first += order[0] in truth
    tally.top_k += len(truth.intersection(order[: len(truth)]))
    for m, (found, found_misses, issued) in tally.at_m.items():
        useful = len(misses.intersection(absent[:m]))
        tally.at_m[m] = [found + len(truth.intersection(order[:m])), found_misses + useful, issued + len(absent[:m])]
    used_E = np.zeros(len(probability_E))
    used_E[needed] = 1
    bin_E = np.minimum((probability_E * _BINS).astype(int), _BINS - 1)
    for row, weights in enumerate((None, probability_E, used_E)):
        tally.bins[:, row] += np.bincount(bin_E, weights=weights, minlength=_BINS)


def _score(tally: _Tally, predict_us: float, lookahead: int, tokens: int, top: int) -> Score:
    count, stated, observed = tally.bins.T
    return Score(
        recall={m: found / tally.used for m, (found, _, _) in tally.at_m.items()},
        miss_recall={m: found / max(1, tally.missed) for m, (_, found, _) in tally.at_m.items()},
        wasted={m: 1 - found / max(1, issued) for m, (_, found, issued) in tally.at_m.items()},
        precision=tally.top_k / (tally.events * top),
        top_guess=tally.first / tally.events,
        calibration_error=float(np.abs(stated - observed).sum() / count.sum()),
        predict_us=predict_us,
        lookahead=lookahead,
        tokens=tokens,
    )
