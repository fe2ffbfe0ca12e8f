"""Predictors that count: of a sequence's history, of the token, of the layers before, of experts that work together.

Legend: L MoE layers, E experts of a layer, N tokens of a table, G groups.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tidegate.experts.predictor import (
    COUNT,
    F32,
    HEAT,
    LAST,
    NO_TOKEN,
    Array,
    Calibration,
    History,
    HistoryPredictor,
    TokenRows,
)


class LastToken(HistoryPredictor):
    """The experts of the sequence's token before, same layer."""

    sees_layers, remembers = False, (LAST,)

    def score(self, history: History, layer: int, *, is_next_step: bool) -> F32:
        return np.asarray(history.last_LE[layer], np.float32)


class SlidingWindow(HistoryPredictor):
    """Share of the last ``window`` tokens that used the expert."""

    sees_layers, remembers = False, (COUNT,)
    window = 16

    def score(self, history: History, layer: int, *, is_next_step: bool) -> F32:
        seen = max(1, min(int(history.seen_L[layer]), self.window))
        return np.asarray(history.count_LE[layer] / seen, np.float32)


class DecayedCounts(HistoryPredictor):
    """Uses that fade by half every 16 tokens."""

    sees_layers, remembers = False, (HEAT,)

    def score(self, history: History, layer: int, *, is_next_step: bool) -> F32:
        return np.asarray(history.heat_LE[layer], np.float32)


class TokenTable(HistoryPredictor):
    """What the input token used before, whatever the context: rows for frequent tokens, a prior for the others."""

    sees_layers = False
    arrays: ClassVar = ("tokens", "table_NLE", "prior_LE")

    def __init__(
        self, num_layers: int, num_experts: int, tokens: Array, table_NLE: Array, prior_LE: Array,
        calibration: Calibration | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_layers, num_experts, calibration)
        self.tokens, self.table_NLE, self.prior_LE = tokens, table_NLE, np.asarray(prior_LE, np.float32)
        self._row_of = TokenRows(tokens)

    def score(self, history: History, layer: int, *, is_next_step: bool) -> F32:
        row = self._row_of(NO_TOKEN if is_next_step else history.token)
        return np.asarray(self.prior_LE[layer] if row is None else self.table_NLE[row, layer], np.float32)


class Markov(HistoryPredictor):
    """What followed on the experts of one, two or three layers before, of the same token: the mean of their rows."""

    remembers = (LAST,)
    arrays: ClassVar = ("table_ALEE", "prior_LE")

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        table_ALEE: Array,
        prior_LE: Array,
        calibration: Calibration | None = None,
    ) -> None:
        super().__init__(num_layers, num_experts, calibration)
        self.table_ALEE, self.prior_LE = table_ALEE, np.asarray(prior_LE, np.float32)

    def score(self, history: History, layer: int, *, is_next_step: bool) -> F32:
        routed = self.latest_routed(layer)
        ahead = layer - routed
        if routed < 0 or ahead > len(self.table_ALEE):
            return np.asarray(self.prior_LE[layer], np.float32)
        before = np.flatnonzero(history.last_LE[routed])
        mean: F32 = self.table_ALEE[ahead - 1, layer, before].astype(np.float32).mean(axis=0)
        return mean


class Groups(HistoryPredictor):
    """Cluster prefetch: experts that are used together form groups; a group is as hot as its members were at the token
    before."""

    sees_layers, remembers = False, (LAST,)
    arrays: ClassVar = ("group_LE",)

    def __init__(
        self, num_layers: int, num_experts: int, group_LE: Array, calibration: Calibration | None = None
    ) -> None:
        super().__init__(num_layers, num_experts, calibration)
        self.group_LE = np.asarray(group_LE, np.int64)
        self._size = int(self.group_LE.max()) + 1

    def score(self, history: History, layer: int, *, is_next_step: bool) -> F32:
        group_E = self.group_LE[layer]
        last = history.last_LE[layer]
        used = np.bincount(group_E, weights=last, minlength=self._size)
        return np.asarray(used[group_E] / max(1.0, float(last.sum())), np.float32)
