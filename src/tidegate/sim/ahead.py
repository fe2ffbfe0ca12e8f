"""What loads experts before they are needed in the simulator: the engine's own Lookahead, on the guesses that the gates made
while the trace was recorded or on a predictor's, or a predictor with a fixed rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tidegate.errors import UsageError
from tidegate.experts.cache import ExpertCache
from tidegate.experts.foreseer import Foreseer
from tidegate.experts.lookahead import AHEAD, AT_START, OWN_CURVES, Curve, Lookahead
from tidegate.experts.predictor import Array, Predictor
from tidegate.sim.clock import ClockLoader
from tidegate.sim.oracle import Oracle
from tidegate.sim.prefetcher import Prefetcher, PrefetchOptions
from tidegate.sim.replay import Step


@dataclass(frozen=True)
class Gates:
    """The engine's own prefetch. ``curves`` are the odds that it starts from (``TraceMeta.guess_curves``); none:
    those of the routers' own gates."""

    curves: Sequence[Curve] = ()


Foresight = Predictor | Gates


class Ahead(ABC):
    """``spend`` is called with the number of predictions that were made, each of which takes time, and perhaps with how many of
    the experts that they name are not in memory."""

    @abstractmethod
    def begin_step(self, step: Step) -> None:
        """A forward pass starts."""

    def at_start(self, layer: int) -> None:  # noqa: B027  (predictors speak when a layer was routed)
        """The layer's attention is about to start."""

    @abstractmethod
    def after_route(self, layer: int) -> None:
        """The layer's own loads are queued."""


def make_ahead(
    foresight: Foresight,
    cache: ExpertCache,
    loader: ClockLoader,
    options: PrefetchOptions,
    spend: Callable[..., None],
) -> Ahead:
    """Without a threshold in ``options`` as the engine does it."""
    if isinstance(foresight, Gates):
        return GatesAhead(cache, loader, foresight.curves or OWN_CURVES, spend)
    if options.threshold is None:
        return PredictorAhead(foresight, cache, loader, options.staging - 1, spend)
    return FixedAhead(foresight, Prefetcher(cache, foresight, options), spend)


def _sketch_for(predictor: Predictor, step: Step, layer: int) -> Array | None:
    """Raises UsageError if the trace has none, or others."""
    wanted, found = predictor.sketch_dims, step.sketch_TLS.shape[2]
    if wanted and wanted != found:
        raise UsageError(
            f"--predictor: needs what the routers saw in {wanted} numbers, and the trace has {found}; record it with "
            f"--sketch {wanted}"
        )
    return step.sketch_TLS[:, layer] if wanted else None


class PredictorAhead(Ahead):
    """Drives a Foreseer as the engine does."""

    def __init__(
        self, predictor: Predictor, cache: ExpertCache, loader: ClockLoader, reach: int, spend: Callable[..., None]
    ) -> None:
        self._predictor, self._cache, self._loader, self._reach, self._spend = predictor, cache, loader, reach, spend
        self._foreseer: Foreseer | None = None

    def begin_step(self, step: Step) -> None:
        if self._foreseer is None:
            per_token = step.experts_TLK.shape[2]
            busy = self._loader.busy_ratio
            self._foreseer = Foreseer(
                self._cache, self._predictor, per_token, busy, self._reach, lambda: self._loader.now_s
            )
        self._step = step
        if isinstance(self._predictor, Oracle):
            self._predictor.reveal(step.needed_L)
        before = self._foreseer.predictions
        self._foreseer.begin_step(step.sequence_T, step.token_T)
        self._spend(self._foreseer.predictions - before)

    def after_route(self, layer: int) -> None:
        step, foreseer = self._step, self._foreseer
        assert foreseer is not None
        before = foreseer.predictions
        sketch_TS = _sketch_for(self._predictor, step, layer) if foreseer.wants_sketch else None
        foreseer.after_route(layer, step.needed_L[layer], step.experts_TLK[:, layer], sketch_TS)
        self._spend(foreseer.predictions - before)


class FixedAhead(Ahead):
    """Drives a Prefetcher."""

    def __init__(self, predictor: Predictor, prefetcher: Prefetcher, spend: Callable[..., None]) -> None:
        self._predictor, self._prefetcher, self._spend = predictor, prefetcher, spend

    def begin_step(self, step: Step) -> None:
        self._step = step
        if isinstance(self._predictor, Oracle):
            self._predictor.reveal(step.needed_L)
        self._prefetcher.begin_step(step.sequence_T, step.token_T)

    def after_route(self, layer: int) -> None:
        step, before = self._step, self._prefetcher.predictions
        sketch_TS = _sketch_for(self._predictor, step, layer)
        self._prefetcher.after_route(layer, step.experts_TLK[:, layer], sketch_TS)
        self._spend(self._prefetcher.predictions - before)


class GatesAhead(Ahead):
    """Drives a Lookahead as the MoE layers of the engine do."""

    def __init__(
        self, cache: ExpertCache, loader: ClockLoader, curves: Sequence[Curve], spend: Callable[..., None]
    ) -> None:
        self._cache, self._loader, self._curves, self._spend = cache, loader, curves, spend
        self._lookahead: Lookahead | None = None

    def begin_step(self, step: Step) -> None:
        self._step = step
        if self._lookahead is None:
            per_token = step.experts_TLK.shape[2]
            busy = self._loader.busy_ratio
            self._lookahead = Lookahead(self._cache, per_token, busy, self._curves, lambda: self._loader.now_s)
        self._lookahead.begin_step(len(step.token_T))

    def at_start(self, layer: int) -> None:
        self._foresee(layer, AT_START)

    def after_route(self, layer: int) -> None:
        assert self._lookahead is not None
        self._lookahead.after_route(layer, self._step.needed_L[layer])
        if layer + 1 < self._cache.num_layers:
            self._foresee(layer + 1, AHEAD)

    def _foresee(self, layer: int, distance: int) -> None:
        lookahead, step = self._lookahead, self._step
        assert lookahead is not None
        margins_TG = step.margins_TLRG[:, layer, distance]
        if not lookahead.wants_guesses or np.isnan(margins_TG).all():
            return
        self._spend(1)  # one gate, however many rows
        for guessed, margins in zip(step.guesses_TLRG[:, layer, distance], margins_TG, strict=True):
            named = ~np.isnan(margins)
            ranked = guessed[named].tolist()
            self._spend(0, len(set(ranked).difference(self._cache.residents(layer))))
            lookahead.foresee(layer, distance, ranked, margins[named].tolist())
