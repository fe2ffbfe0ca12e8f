"""Prefetch by a fixed rule, to try out in the simulator what a threshold, more layers in work or more loads would do. The
engine's own way, which learns its threshold, is ``experts.foreseer``.

Legend: T rows of the step, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidegate.errors import UsageError
from tidegate.experts.cache import ExpertCache
from tidegate.experts.foreseer import REACH
from tidegate.experts.predictor import Array, Predictor


@dataclass(frozen=True)
class PrefetchOptions:
    """``staging`` layers are in work at once: 1 computes and loads one layer, 2 also loads the next (double buffering),
    4 the next three. A load is worth its place above ``threshold``; at most ``most`` are issued a layer. Without a threshold the
    engine's Lookahead decides what is worth a load, and how many."""

    staging: int = REACH + 1
    threshold: float | None = None
    most: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.staging <= 8:
            raise UsageError(f"--staging {self.staging}: 1 to 8 layers are allowed")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise UsageError(f"--threshold {self.threshold}: a probability between 0 and 1 is allowed")
        if self.most < 1:
            raise UsageError(f"--most {self.most}: at least 1 is needed")


class Prefetcher:
    """Issues loads for the layers after the one that was just routed, nearest layer first, most probable expert first.

    The victim is whom a demand load would evict a moment later, except that an expert at least as probable as the new one
    stays. Loads that the router refuted before they finished are cancelled.
    """

    def __init__(self, cache: ExpertCache, predictor: Predictor, options: PrefetchOptions) -> None:
        assert options.threshold is not None
        self._cache, self._predictor, self._options = cache, predictor, options
        self._threshold = options.threshold
        self._num_layers = predictor.num_layers
        self.predictions = 0

    def begin_step(self, sequence_T: Sequence[int], token_T: Sequence[int]) -> None:
        """A forward pass over these rows starts."""
        self._predictor.begin_step(sequence_T, token_T)
        for layer in range(min(self._options.staging - 1, self._num_layers)):
            self._fill(layer)

    def after_route(self, layer: int, topk_expert_ids_TK: Array, sketch_TS: Array | None = None) -> None:
        """Call it when the layer's own loads are queued; ``sketch_TS`` is of what its router saw."""
        self._cache.cancel_refuted(layer)
        if sketch_TS is not None:
            self._predictor.observe_sketch(layer, sketch_TS)
        self._predictor.observe(layer, topk_expert_ids_TK)
        for ahead in range(1, self._options.staging):
            self._fill((layer + ahead) % self._num_layers)

    def _fill(self, layer: int) -> None:
        cache, options = self._cache, self._options
        probability_E = self._predictor.predict(layer)
        self.predictions += 1
        likely = np.flatnonzero(probability_E >= self._threshold).tolist()
        if not likely:
            return
        resident = cache.resident(layer)
        wanted = sorted((-probability_E[expert], expert) for expert in likely if expert not in resident)
        for negative, expert in wanted[: options.most]:
            keep = {one for one in cache.resident(layer) if probability_E[one] >= -negative}
            cache.prefetch(layer, expert, _ABOVE_ALL, keep)


_ABOVE_ALL = float("inf")
