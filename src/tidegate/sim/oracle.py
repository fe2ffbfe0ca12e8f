"""A predictor that knows the future, as far as it is told to: the bound for every real one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from tidegate.experts.predictor import F32, Array, Predictor


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
