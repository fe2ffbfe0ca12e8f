"""Predictors that know the future, as far as they are told to: bounds for every real one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tidegate.experts.lookahead import AHEAD, AT_START
from tidegate.experts.predictor import F32, Array, Predictor
from tidegate.models.guesses import Guess

_FORCED_MARGIN = 0.5  # of every expert that ForcedGuesses name; a usual one


class Oracle(Predictor):
    """Knows which experts the layers of the current step need, misses each with probability 1 - ``recall``, and names wrong
    ones so that a share ``waste`` of what it names is not needed. Nothing is known of the next step."""

    def __init__(
        self, num_layers: int, num_experts: int, recall: float = 1.0, waste: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__(num_layers, num_experts)
        self._recall, self._waste, self._random = recall, waste, random.Random(seed)
        self._needed_L: list[list[int]] = []
        self._said: dict[int, F32] = {}
        self._routed = -1

    def reveal(self, needed_L: Sequence[Sequence[int]]) -> None:
        """The experts of every layer of the step that begins."""
        self._needed_L = [list(needed) for needed in needed_L]

    def begin_step(self, sequence_T: Sequence[int], token_T: Sequence[int]) -> None:
        self._said, self._routed = {}, -1

    def observe(self, layer: int, topk_expert_ids_TK: Array) -> None:
        self._routed = layer

    def predict(self, layer: int) -> F32:
        if layer <= self._routed:
            return np.zeros(self.num_experts, np.float32)
        if layer not in self._said:
            self._said[layer] = self._say(self._needed_L[layer])
        return self._said[layer]

    def _say(self, needed: list[int]) -> F32:
        out = np.zeros(self.num_experts, np.float32)
        draw = self._random.random
        for expert in needed:
            if draw() < self._recall:
                out[expert] = 1.0
        others = sorted(set(range(self.num_experts)) - set(needed))
        wrong = len(needed) * self._recall * self._waste / (1 - self._waste) if self._waste < 1 else len(others)
        count = min(len(others), int(wrong) + (draw() < wrong % 1))
        for expert in self._random.sample(others, count):
            out[expert] = 1.0
        return out


class ForcedGuesses:
    """A Guesser for the engine (``Experts.guesser``) whose guesses are right as often as they are told to be: each of the
    experts that the layer will choose is named with probability ``accuracy``, and another one in its place otherwise, in no
    particular order. ``experts_TLK`` is the routing of an earlier run, one row a step; ``step()`` is the index of the step that
    runs, which has to repeat that run, and answers do so whatever is prefetched."""

    def __init__(
        self, experts_TLK: Array, num_experts: int, accuracy: float, step: Callable[[], int], seed: int = 0
    ) -> None:
        self._step, self.width = step, int(experts_TLK.shape[2])
        # Drawn beforehand, so that they cost the steps no time.
        self._named = [
            [
                _partly_right(needed, num_experts, accuracy, f"{seed} {t} {layer}")
                for layer, needed in enumerate(experts)
            ]
            for t, experts in enumerate(experts_TLK.tolist())
        ]

    def at_start(self, layer: int, x: Any) -> Guess | None:
        """The same as a layer before; nothing of the first layer."""
        return self._guess(layer, AT_START) if layer else None

    def after_route(self, layer: int, x: Any, said_E: Any) -> Guess | None:
        """Of the next layer."""
        return self._guess(layer + 1, AHEAD) if layer + 1 < len(self._named[0]) else None

    def sights(self, odds: Any, caches: Any) -> None:
        """Nothing is native."""

    def _guess(self, layer: int, distance: int) -> Guess:
        return Guess(layer, distance, [self._named[self._step()][layer]], [[_FORCED_MARGIN] * self.width])


def _partly_right(needed: list[int], num_experts: int, accuracy: float, seed: str) -> list[int]:
    """Each of ``needed`` with probability ``accuracy``, and another expert in its place otherwise."""
    draw = random.Random(seed)
    wrong = draw.sample(sorted(set(range(num_experts)).difference(needed)), len(needed))
    named = [one if draw.random() < accuracy else other for one, other in zip(needed, wrong, strict=True)]
    draw.shuffle(named)
    return named
