"""Prefetch from a Predictor: its probabilities are guesses for a Lookahead, which learns what they are worth and loads what pays.

The engine and the simulator run this class. Legend: T rows of the step, K experts per token, E experts, S sketch dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tidegate.experts.cache import ExpertCache
from tidegate.experts.lookahead import MOST_ROWS, Curve, Lookahead
from tidegate.experts.predictor import Array, Predictor
from tidegate.experts.trace import Sketcher

REACH = 2  # layers ahead
# A margin is the logarithm of the odds, so the curves begin with believing them.
PROBABILITY_CURVE: Curve = (1.0, 0.0, 0.0)
# Less probable ones are not named; nor are more than NAMED times as many as a row uses.
_LEAST, _MOST, NAMED = 1 / 64, 1 - 1 / 4096, 2
# Steps without guesses are kept and told to the predictor together, which costs a fraction of one by one.
PENDING_STEPS = 32
_ARRAY_BYTES = 128  # of Python's, an array


def pending_bytes(num_layers: int, num_experts_per_tok: int) -> int:
    """What a Foreseer keeps of steps without guesses, at most."""
    return PENDING_STEPS * num_layers * (_ARRAY_BYTES + 4 * MOST_ROWS * num_experts_per_tok)


class _Step:
    """Rows of a step, and so far what the routers chose for them."""

    def __init__(self, sequence_T: Sequence[int], token_T: Sequence[int]) -> None:
        self.sequence_T, self.token_T = sequence_T, token_T
        self.layers: list[Array] = []


class Foreseer:
    """Drive it in the order of a step: ``begin_step``, and for every MoE layer ``after_route`` once its own loads are queued.

    ``busy_ratio`` and ``clock`` as in Lookahead; ``reach``: so many layers ahead. ``predictions`` counts calls of the
    predictor; ``sketch`` makes what it wants to see of a router's input."""

    def __init__(
        self,
        cache: ExpertCache,
        predictor: Predictor,
        experts_per_token: int,
        busy_ratio: Callable[[], float],
        reach: int = REACH,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.lookahead = Lookahead(cache, experts_per_token, busy_ratio, (PROBABILITY_CURVE,) * reach, clock)
        self.predictor, self.predictions = predictor, 0
        self.sketch = Sketcher(predictor.sketch_dims)
        self._reach, self._per_row = reach, NAMED * experts_per_token
        self._num_named = 0
        self._pending: list[_Step] = []
        self._is_pending = False

    @property
    def wants_sketch(self) -> bool:
        """Whether ``after_route`` needs a sketch of what the router saw, in this step."""
        return self.lookahead.wants_guesses and self.predictor.sketch_dims > 0

    def begin_step(self, sequence_T: Sequence[int], token_T: Sequence[int]) -> None:
        """A forward pass over these rows starts: sequence ids and input token ids (kept)."""
        lookahead, rows = self.lookahead, len(token_T)
        lookahead.begin_step(rows)
        self._is_pending = not lookahead.wants_guesses and rows <= MOST_ROWS and len(self._pending) < PENDING_STEPS
        if self._is_pending:
            self._pending.append(_Step(sequence_T, token_T))
            return
        if self._pending:
            self._catch_up()
        self.predictor.begin_step(sequence_T, token_T)
        self._num_named = self._per_row * rows
        self._foresee(-1)

    def after_route(
        self, layer: int, needed: Sequence[int], topk_expert_ids_TK: Array, sketch_TS: Array | None = None
    ) -> None:
        """What the router of ``layer`` chose, and if wanted a sketch of what it saw."""
        self.lookahead.after_route(layer, needed)
        if self._is_pending:
            self._pending[-1].layers.append(topk_expert_ids_TK.copy())
            return
        if sketch_TS is not None:
            self.predictor.observe_sketch(layer, sketch_TS)
        self.predictor.observe(layer, topk_expert_ids_TK)
        self._foresee(layer)

    def _catch_up(self) -> None:
        """Tell the predictor of the steps that it was not asked in, a sequence's rows together, those that are done first; not
        of a step that failed."""
        steps = [step for step in self._pending if len(step.layers) == self.predictor.num_layers]
        self._pending = []
        if not steps:
            return
        sequence_T = [sequence for step in steps for sequence in step.sequence_T]
        last_row = {sequence: row for row, sequence in enumerate(sequence_T)}
        order = np.argsort([last_row[sequence] for sequence in sequence_T], kind="stable")
        token_T = [token for step in steps for token in step.token_T]
        self.predictor.begin_step([sequence_T[row] for row in order], [token_T[row] for row in order])
        for layer, parts in enumerate(zip(*(step.layers for step in steps), strict=True)):
            self.predictor.observe(layer, np.concatenate(parts)[order])

    def _foresee(self, layer: int) -> None:
        """``layer`` -1: before the first."""
        if not self.lookahead.wants_guesses:
            return
        first = 1 if layer < 0 or self.predictor.sees_layers else self._reach
        for distance in range(first, min(self._reach, self.predictor.num_layers - 1 - layer) + 1):
            probability_E = self.predictor.predict(layer + distance)
            self.predictions += 1
            likely = np.flatnonzero(probability_E >= _LEAST)
            if not likely.size:
                continue
            probability = np.minimum(probability_E[likely], _MOST)
            best = np.argsort(-probability, kind="stable")[: self._num_named]
            margins = np.log(probability / (1 - probability))
            self.lookahead.foresee(layer + distance, distance - 1, likely[best].tolist(), margins[best].tolist())
