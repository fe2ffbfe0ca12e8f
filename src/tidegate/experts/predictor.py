"""Predictors: how probable it is that an expert of an upcoming layer is used. Needs numpy only.

The engine and the simulator drive one the same way: ``begin_step`` with the rows of a forward pass, then ``observe`` after
every MoE layer's router, and ``predict`` for a layer that has not been routed yet. A layer that was already routed in this
step means the same layer of the next step, whose token is not known yet.

Legend: T rows of the step, L MoE layers, E experts of a layer, K experts per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Array = NDArray[Any]
HALF_LIFE_TOKENS, SLOW_HALF_LIFE_TOKENS = 16.0, 128.0
FADE = np.float32(2.0 ** (-1.0 / HALF_LIFE_TOKENS))
SLOW_FADE = np.float32(2.0 ** (-1.0 / SLOW_HALF_LIFE_TOKENS))
MOST_SEQUENCES = 1024
CLASS_TOKENS = 32
NO_TOKEN = -1


class Predictor(ABC):
    """One model's predictor. Same calls, same answers."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.num_layers, self.num_experts = num_layers, num_experts

    @abstractmethod
    def begin_step(self, sequence_T: Sequence[int], token_T: Sequence[int]) -> None:
        """A forward pass over these rows starts: sequence ids and input token ids. Rows of a sequence are in order."""

    @abstractmethod
    def observe(self, layer: int, topk_expert_ids_TK: Array) -> None:
        """What the router of ``layer`` chose; layers come in order."""

    @abstractmethod
    def predict(self, layer: int) -> F32:
        """float32 [E] in 0..1: the probability that at least one row uses the expert in the layer's next visit. A view that
        may be overwritten by the next call."""

    def observe_hidden(self, layer: int, hidden_TD: F32) -> None:  # noqa: B027  (most have no use for it)
        """The hidden state at the router of ``layer``, before ``observe``; only those who need it look at it."""


class History:
    """What is remembered of one sequence: for each layer the experts of its latest token, counts decayed by half in 16 and in
    128 tokens, and counts of a window; and the latest input tokens."""

    def __init__(self, num_layers: int, num_experts: int, window: int) -> None:
        shape = (num_layers, num_experts)
        self.token = NO_TOKEN
        self.tokens: deque[int] = deque(maxlen=CLASS_TOKENS)
        self.last_LE = np.zeros(shape, np.float32)
        self.heat_LE = np.zeros(shape, np.float32)
        self.slow_LE = np.zeros(shape, np.float32)
        self.count_LE = np.zeros(shape, np.float32)
        self.seen_L = np.zeros(num_layers, np.int64)
        self._ring_LW: list[list[Array]] = [[] for _ in range(num_layers)]
        self._window = window

    def add(self, layer: int, experts_K: Array) -> None:
        """The layer's experts of the sequence's next token."""
        last, heat, slow, count = self.last_LE[layer], self.heat_LE[layer], self.slow_LE[layer], self.count_LE[layer]
        last[:] = 0
        last[experts_K] = 1
        heat *= FADE
        heat[experts_K] += 1 - FADE
        slow *= SLOW_FADE
        slow[experts_K] += 1 - SLOW_FADE
        ring = self._ring_LW[layer]
        ring.append(experts_K)
        count[experts_K] += 1
        if len(ring) > self._window:
            count[ring.pop(0)] -= 1
        self.seen_L[layer] += 1

    def recent(self, layer: int, tokens: int) -> list[Array]:
        """Expert ids of the latest ``tokens`` tokens at most, oldest first."""
        return self._ring_LW[layer][-tokens:]


class HistoryPredictor(Predictor):
    """A raw score for every row from its sequence's history, made a probability by the calibration, combined over rows as
    if they were independent."""

    window = 1

    def __init__(self, num_layers: int, num_experts: int, calibration: Calibration | None = None) -> None:
        super().__init__(num_layers, num_experts)
        self.calibration = calibration
        self._histories: dict[int, History] = {}
        self._rows: list[History] = []
        self._routed = -1

    def begin_step(self, sequence_T: Sequence[int], token_T: Sequence[int]) -> None:
        self._routed = -1
        self._rows = []
        for sequence, token in zip(sequence_T, token_T, strict=True):
            history = self._histories.pop(sequence, None)
            if history is None:
                history = History(self.num_layers, self.num_experts, self.window)
                if len(self._histories) >= MOST_SEQUENCES:
                    del self._histories[next(iter(self._histories))]
            self._histories[sequence] = history  # the end of the dict: least recently used goes first
            history.token = token
            history.tokens.append(token)
            self._rows.append(history)

    def observe(self, layer: int, topk_expert_ids_TK: Array) -> None:
        for history, experts_K in zip(self._rows, topk_expert_ids_TK, strict=True):
            history.add(layer, experts_K)
        self._routed = layer

    def predict(self, layer: int) -> F32:
        not_used = None
        # Rows of one sequence share a history: a long prompt chunk counts it once.
        for history in dict.fromkeys(self._rows):
            probability = self.score(history, layer, is_next_step=layer <= self._routed)
            if self.calibration is not None:
                probability = self.calibration(probability)
            not_used = 1 - probability if not_used is None else not_used * (1 - probability)
        return np.zeros(self.num_experts, np.float32) if not_used is None else 1 - not_used

    @abstractmethod
    def score(self, history: History, layer: int, *, is_next_step: bool) -> F32:
        """float32 [E] in 0..1 for one row, higher is more probable."""

    def latest_routed(self, layer: int) -> int:
        """The last layer of this step that was routed before ``layer``; -1 if none was, or ``layer`` is of the next step."""
        return self._routed if self._routed < layer else -1


class Calibration:
    """A rising curve from raw score to observed frequency, linear between its points."""

    def __init__(self, scores: Array, frequencies: Array) -> None:
        self.scores, self.frequencies = np.asarray(scores, np.float32), np.asarray(frequencies, np.float32)

    def __call__(self, score: F32) -> F32:
        return np.interp(score, self.scores, self.frequencies).astype(np.float32)

    @staticmethod
    def fit(scores: Array, used: Array, num_bins: int = 32) -> Calibration:
        """From pairs of raw score and whether it came true (0 or 1): mean frequency in bins of equal size, made to rise by
        pooling neighbours (isotonic regression)."""
        order = np.argsort(scores, kind="stable")
        values, truth = np.asarray(scores)[order].astype(np.float64), np.asarray(used)[order].astype(np.float64)
        edges = np.unique(np.searchsorted(values, np.unique(np.quantile(values, np.linspace(0, 1, num_bins + 1)))))
        blocks: list[list[float]] = []  # score sum, hits, weight
        for start, stop in zip(edges, [*edges[1:], len(values)], strict=True):
            blocks.append([values[start:stop].sum(), truth[start:stop].sum(), float(stop - start)])
            while len(blocks) > 1 and blocks[-2][1] * blocks[-1][2] > blocks[-1][1] * blocks[-2][2]:
                last = blocks.pop()
                blocks[-1] = [a + b for a, b in zip(blocks[-1], last, strict=True)]
        return Calibration(np.array([s / w for s, _, w in blocks]), np.array([h / w for _, h, w in blocks]))
