"""Predictors: how probable it is that an expert of an upcoming layer is used. Needs numpy only.

The engine and the simulator drive one the same way: ``begin_step`` with the rows of a forward pass, then ``observe`` after
every MoE layer's router, and ``predict`` for a layer that has not been routed yet. A layer that was already routed in this
step means the same layer of the next step, whose token is not known yet.

Legend: T rows of the step, L MoE layers, E experts of a layer, K experts per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

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
# What a history may remember.
ALL_COLUMNS = LAST, HEAT, SLOW, COUNT = "last", "heat", "slow", "count"
_NOTHING = np.zeros((0, 0), np.float32)
_OBJECT_BYTES = 4096  # of Python's, a history


class Predictor(ABC):
    """One model's predictor. Same calls, same answers."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.num_layers, self.num_experts = num_layers, num_experts
        self.most_sequences = MOST_SEQUENCES  # that it remembers; those before are forgotten

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

    # Whether what it says of a layer depends on the layers before, in the same step; else it is asked once.
    sees_layers = True

    @property
    def sketch_dims(self) -> int:
        """How many numbers of a router's input it wants to see; 0: none."""
        return 0

    def observe_sketch(self, layer: int, sketch_TS: Array) -> None:  # noqa: B027  (most have no use for it)
        """What the router of ``layer`` saw, before ``observe``, projected to ``sketch_dims`` numbers as traces keep it
        (``experts.trace.Sketcher``). Whoever wants it makes do without where there is none."""

    @classmethod
    def history_bytes(cls, num_layers: int, num_experts: int, num_experts_per_tok: int) -> int:
        """What it remembers of one sequence, at most."""
        return 0


class History:
    """What is remembered of one sequence, as far as ``remembers`` names it: for each layer the experts of its latest token,
    counts decayed by half in 16 and in 128 tokens, and counts of a window; the experts of the latest ``window`` tokens (0: of
    none); and the latest input tokens."""

    def __init__(self, num_layers: int, num_experts: int, remembers: Collection[str], window: int) -> None:
        kept = {name: np.zeros((num_layers, num_experts), np.float32) for name in remembers}
        self.token = NO_TOKEN
        self.tokens: deque[int] = deque(maxlen=CLASS_TOKENS)
        self.last_LE, self.heat_LE, self.slow_LE, self.count_LE = (kept.get(name, _NOTHING) for name in ALL_COLUMNS)
        self.seen_L = [0] * num_layers
        self._fading = [(kept[name], fade) for name, fade in ((HEAT, FADE), (SLOW, SLOW_FADE)) if name in kept]
        self._ring_LWK: Array = np.zeros((num_layers, window, 0), np.int32)

    def add(self, layer: int, experts_TK: Array) -> None:
        """The layer's experts of the sequence's next tokens."""
        if len(self.last_LE):
            last = self.last_LE[layer]
            last[:] = 0
            last[experts_TK[-1]] = 1
        for counts_LE, fade in self._fading:
            _fade_in(counts_LE[layer], experts_TK, fade)
        if self._ring_LWK.shape[1]:
            self._slide(layer, experts_TK)
        self.seen_L[layer] += len(experts_TK)

    def recent(self, layer: int, tokens: int) -> Array:
        """[n, K]: expert ids of the latest ``tokens`` tokens at most, oldest first."""
        seen, window = self.seen_L[layer], self._ring_LWK.shape[1]
        latest_NK: Array = self._ring_LWK[layer, np.arange(seen - min(seen, tokens, window), seen) % window]
        return latest_NK

    def _slide(self, layer: int, experts_TK: Array) -> None:
        num_layers, window, per_token = self._ring_LWK.shape
        if not per_token:
            self._ring_LWK = np.zeros((num_layers, window, experts_TK.shape[1]), np.int32)
        ring_WK, seen, rows = self._ring_LWK[layer], self.seen_L[layer], len(experts_TK)
        count = self.count_LE[layer] if len(self.count_LE) else None
        if rows == 1:
            place = ring_WK[seen % window]
            if count is not None:
                if seen >= window:
                    count[place] -= 1
                count[experts_TK[0]] += 1
            place[:] = experts_TK[0]
            return
        kept = min(rows, window)
        ring_WK[np.arange(seen + rows - kept, seen + rows) % window] = experts_TK[rows - kept :]
        if count is not None:
            count[:] = np.bincount(ring_WK[: seen + rows].ravel(), minlength=len(count))


def _fade_in(counts_E: F32, experts_TK: Array, fade: np.float32) -> None:
    """Counts that fade with every token, after these ones."""
    rows, per_token = experts_TK.shape
    if rows == 1:
        counts_E *= fade
        counts_E[experts_TK[0]] += 1 - fade
        return
    weight_T = (1 - fade) * fade ** np.arange(rows - 1, -1, -1)
    counts_E *= fade**rows
    counts_E += np.bincount(experts_TK.ravel(), np.repeat(weight_T, per_token), len(counts_E))


class TokenRows:
    """Rows of a table by token; ``tokens`` ascend."""

    def __init__(self, tokens: Array) -> None:
        self._tokens = tokens
        self._latest: tuple[int, int | None] = NO_TOKEN, None

    def __call__(self, token: int) -> int | None:
        if token != self._latest[0]:
            row = int(np.searchsorted(self._tokens, token))
            self._latest = token, row if row < len(self._tokens) and self._tokens[row] == token else None
        return self._latest[1]


class HistoryPredictor(Predictor):
    """A raw score for every row from its sequence's history, made a probability by the calibration, combined over rows as
    if they were independent."""

    remembers: ClassVar[tuple[str, ...]] = ()
    window = 0

    def __init__(self, num_layers: int, num_experts: int, calibration: Calibration | None = None) -> None:
        super().__init__(num_layers, num_experts)
        self.calibration = calibration
        self._histories: dict[int, History] = {}
        self._rows: list[History] = []  # of each run of rows of one sequence, and where the run ends
        self._ends: list[int] = []
        self._routed = -1

    def begin_step(self, sequence_T: Sequence[int], token_T: Sequence[int]) -> None:
        self._routed, self._rows, self._ends = -1, [], []
        known, mine = self._histories, dict[int, History]()
        for sequence in dict.fromkeys(sequence_T):
            history = known.pop(sequence) if sequence in known else self._new_history()
            mine[sequence] = known[sequence] = history
        while len(known) > self.most_sequences:
            del known[next(iter(known))]  # whose rows came last the longest ago
        for row, (sequence, token) in enumerate(zip(sequence_T, token_T, strict=True), start=1):
            history = mine[sequence]
            history.token = token
            history.tokens.append(token)
            if self._rows and self._rows[-1] is history:
                self._ends[-1] = row
            else:
                self._rows.append(history)
                self._ends.append(row)

    def observe(self, layer: int, topk_expert_ids_TK: Array) -> None:
        start = 0
        for history, end in zip(self._rows, self._ends, strict=True):
            history.add(layer, topk_expert_ids_TK[start:end])
            start = end
        self._routed = layer

    @classmethod
    def history_bytes(cls, num_layers: int, num_experts: int, num_experts_per_tok: int) -> int:
        columns = 4 * num_experts * len(cls.remembers)
        return num_layers * (columns + 4 * num_experts_per_tok * cls.window) + _OBJECT_BYTES

    def _new_history(self) -> History:
        return History(self.num_layers, self.num_experts, self.remembers, self.window)

    def predict(self, layer: int) -> F32:
        not_used = None
        # Rows of one sequence share a history and count once.
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
