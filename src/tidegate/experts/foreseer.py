"""Prefetch from a Predictor: its probabilities are guesses for a Lookahead, which learns what they are worth and loads what pays.

The engine and the simulator run this class. Legend: T rows of the step, K experts per token, E experts, S sketch dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from tidegate.experts.cache import ExpertCache
from tidegate.experts.lookahead import REACH, Curve, Lookahead
from tidegate.experts.predictor import Array, Predictor
from tidegate.experts.trace import Sketcher

# A margin is the logarithm of the odds, so the curves begin with believing them.
PROBABILITY_CURVE: Curve = (1.0, 0.0, 0.0)
# Less probable ones are not named; nor are more than NAMED times as many as a row uses.
_LEAST, _MOST, NAMED = 1 / 64, 1 - 1 / 4096, 2


class Foreseer:
    """Drive it in the order of a step: ``begin_step``, and for every MoE layer ``after_route`` once its own loads are queued.

    ``busy_ratio`` as in Lookahead; ``reach``: so many layers ahead. ``predictions`` counts calls of the predictor; ``sketch``
    makes what it wants to see of a router's input."""

    def __init__(
        self,
        cache: ExpertCache,
        predictor: Predictor,
        experts_per_token: int,
        busy_ratio: Callable[[], float],
        reach: int = REACH,
    ) -> None:
        self.lookahead = Lookahead(cache, experts_per_token, busy_ratio, (PROBABILITY_CURVE,) * reach)
        self.predictor, self.predictions = predictor, 0
        self.sketch = Sketcher(predictor.sketch_dims)
        self._reach, self._per_row = reach, NAMED * experts_per_token
        self._num_named = 0

    @property
    def wants_sketch(self) -> bool:
        """Whether ``after_route`` needs a sketch of what the router saw, in this step."""
        return self.lookahead.wants_guesses and self.predictor.sketch_dims > 0

    def begin_step(self, sequence_T: Sequence[int], token_T: Sequence[int]) -> None:
        """A forward pass over these rows starts: sequence ids and input token ids."""
        self.lookahead.begin_step(len(token_T))
        self.predictor.begin_step(sequence_T, token_T)
        self._num_named = self._per_row * len(token_T)
        self._foresee(-1)

    def after_route(
        self, layer: int, needed: Collection[int], topk_expert_ids_TK: Array, sketch_TS: Array | None = None
    ) -> None:
        """What the router of ``layer`` chose, and if wanted a sketch of what it saw."""
        self.lookahead.after_route(layer, needed)
        if sketch_TS is not None:
            self.predictor.observe_sketch(layer, sketch_TS)
        self.predictor.observe(layer, topk_expert_ids_TK)
        self._foresee(layer)

    def _foresee(self, layer: int) -> None:
        """``layer`` -1: before the first."""
        if not self.lookahead.wants_guesses:
            return
        for distance in range(1, min(self._reach, self.predictor.num_layers - 1 - layer) + 1):
            probability_E = self.predictor.predict(layer + distance)
            self.predictions += 1
            likely = np.flatnonzero(probability_E >= _LEAST)
            if not likely.size:
                continue
            probability = np.minimum(probability_E[likely], _MOST)
            best = np.argsort(-probability, kind="stable")[: self._num_named]
            margins = np.log(probability / (1 - probability))
            self.lookahead.foresee(layer + distance, distance, likely[best].tolist(), margins[best].tolist())
