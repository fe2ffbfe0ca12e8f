"""What loads experts before they are needed in the simulator: a predictor with a Prefetcher, or the engine's own Lookahead on
the guesses that the gates made while the trace was recorded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import numpy as np

from tidegate.experts.cache import ExpertCache
from tidegate.experts.lookahead import MARGIN_CURVES, RANK_CURVES, Lookahead
from tidegate.experts.predictor import Predictor
from tidegate.experts.prefetch import Prefetcher, PrefetchOptions
from tidegate.sim.clock import ClockLoader
from tidegate.sim.oracle import Oracle
from tidegate.sim.replay import Step

Foresight = Predictor | Literal["gates"]


class Ahead(ABC):
    """``spend`` is called with the number of predictions that were made, each of which takes time."""

    @abstractmethod
    def begin_step(self, step: Step) -> None:
        """A forward pass starts."""

    @abstractmethod
    def after_route(self, layer: int) -> None:
        """The layer's own loads are queued."""


def make_ahead(
    foresight: Foresight,
    cache: ExpertCache,
    loader: ClockLoader,
    options: PrefetchOptions,
    spend: Callable[[int], None],
) -> Ahead:
    if isinstance(foresight, str):
        return GatesAhead(cache, loader, spend)
    return PredictorAhead(foresight, Prefetcher(cache, foresight, options), spend)


class PredictorAhead(Ahead):
    def __init__(self, predictor: Predictor, prefetcher: Prefetcher, spend: Callable[[int], None]) -> None:
        self._predictor, self._prefetcher, self._spend = predictor, prefetcher, spend

    def begin_step(self, step: Step) -> None:
        self._step = step
        if isinstance(self._predictor, Oracle):
            self._predictor.reveal(step.needed_L)
        self._prefetcher.begin_step(step.sequence_T, step.token_T)

    def after_route(self, layer: int) -> None:
        step, before = self._step, self._prefetcher.predictions
        sketch_TS = step.sketch_TLS[:, layer] if step.sketch_TLS.shape[2] else None
        self._prefetcher.after_route(layer, step.experts_TLK[:, layer], sketch_TS)
        self._spend(self._prefetcher.predictions - before)


class GatesAhead(Ahead):
    """Drives a Lookahead as the MoE layers of the engine do."""

    def __init__(self, cache: ExpertCache, loader: ClockLoader, spend: Callable[[int], None]) -> None:
        self._cache, self._loader, self._spend = cache, loader, spend
        self._lookahead: Lookahead | None = None
        self._has_margins = False

    def begin_step(self, step: Step) -> None:
        self._step = step
        if self._lookahead is None:
            self._has_margins = bool(np.nan_to_num(step.margins_TLRG).any())
            curves = MARGIN_CURVES if self._has_margins else RANK_CURVES
            self._lookahead = Lookahead(self._cache, step.experts_TLK.shape[2], self._loader.busy_ratio, curves)
        self._lookahead.begin_step(len(step.token_T))
        self._foresee(-1)

    def after_route(self, layer: int) -> None:
        assert self._lookahead is not None
        self._lookahead.after_route(layer, self._step.needed_L[layer])
        self._foresee(layer)

    def _foresee(self, layer: int) -> None:
        """What was guessed after ``layer``; -1: before the first."""
        lookahead, step = self._lookahead, self._step
        assert lookahead is not None
        if not lookahead.wants_guesses:
            return
        _, num_layers, reach, _ = step.guesses_TLRG.shape
        for distance in range(1, min(reach, num_layers - 1 - layer) + 1):
            margins_TG = step.margins_TLRG[:, layer + distance, distance - 1]
            if np.isnan(margins_TG).all():
                continue
            self._spend(1)  # one gate, however many rows
            for ranked, margins in zip(step.guesses_TLRG[:, layer + distance, distance - 1], margins_TG, strict=True):
                named = ~np.isnan(margins)
                above = margins[named].tolist() if self._has_margins else None
                lookahead.foresee(layer + distance, distance, ranked[named].tolist(), above)
