"""Guesses at what a router will choose, by gates on hidden states that are there before its own: at the start of its layer,
before the attention, and where the MoE layer before it was routed. The gates are the routers' own, or fitted to that.

What lies between gate and router, the attention above all, adds much the same from one token to the next: so each gate's bias
follows what its router said beyond it.

The later guess is much the better one, and early enough for a load that would hold a layer up only a little; the earlier one
gives a load a whole layer more. Two layers ahead was tried: these find what it finds, and it is wrong more often.

T tokens of the step, D hidden, E experts, G experts of a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tidegate.backends.base import A, Backend, Gate, Ranking
from tidegate.backends.operands import F32Array, Linear, Norm
from tidegate.backends.reference_math import choice_scores, ranked_margins
from tidegate.experts.gates_file import Gate as GateArrays
from tidegate.experts.gates_file import next_gate, start_gate
from tidegate.experts.lookahead import AHEAD, AT_START
from tidegate.model_config import MoeConfig
from tidegate.models.weights import MoeWeights

if TYPE_CHECKING:
    from tidegate import _core

IdArray = NDArray[np.integer[Any]]
Input_contra = TypeVar("Input_contra", contravariant=True)


class Guess(NamedTuple):
    """For every row of the step the experts that ``layer`` would choose, best first, and perhaps more; and their margins, as
    Backend.rank gives them. ``distance``: AT_START or AHEAD."""

    layer: int
    distance: int
    experts_TG: Sequence[Sequence[int]]
    margins_TG: Sequence[Sequence[float]]


class Guesser(Protocol[Input_contra]):
    """Asked by the MoE layers in steps that want guesses; None where it has nothing to say. It leaves no arrays in the backend.
    ``width``: the most experts of a guess."""

    width: int

    def at_start(self, layer: int, x: Input_contra) -> Guess | None:
        """At MoE layer ``layer``. ``x`` [T, D]: the hidden state that its attention is about to read."""

    def after_route(self, layer: int, x: Input_contra, said_E: F32Array | None) -> Guess | None:
        """At the MoE layer after ``layer``. ``x`` [T, D]: what the router of ``layer`` saw, and ``said_E`` said of it."""

    def sights(self, odds: _core.Odds, caches: Sequence[_core.LayerCache]) -> Sequence[_core.Sight] | None:
        """The same for steps of one token, one a layer, with what is loaded ahead for it; None where there is no such thing."""


class Gates(Generic[A]):
    """``linears``: the gates by name, as own_gates or a fitted predictor has them; some may be missing. Their biases move."""

    def __init__(
        self, backend: Backend[A], layers: Sequence[MoeWeights], linears: Mapping[str, Linear], moe: MoeConfig
    ) -> None:
        self._backend, self._layers, self._moe, self._has_rule = backend, layers, moe, has_rule(moe)
        self.width = min(2 * moe.num_experts_per_tok, moe.num_experts)

        def gate(name: str, norm: Norm | None) -> Gate[A] | None:
            linear = linears.get(name)
            return None if linear is None else backend.make_gate(linear, norm, moe.num_experts_per_tok, self.width)

        self._start = [gate(start_gate(layer), weights.norm) for layer, weights in enumerate(layers)]
        self._next = [gate(next_gate(layer), None) for layer in range(len(layers))]

    def at_start(self, layer: int, x: A) -> Guess | None:
        gate = self._start[layer]
        return None if gate is None else Guess(layer, AT_START, *self._ranked(layer, x, gate))

    def after_route(self, layer: int, x: A, said_E: F32Array | None) -> Guess | None:
        for gate in (self._start[layer], self._before(layer)):
            if gate is not None and said_E is not None:
                gate.follow(said_E)
        gate = self._next[layer]
        return None if gate is None else Guess(layer + 1, AHEAD, *self._ranked(layer + 1, x, gate))

    def sights(self, odds: _core.Odds, caches: Sequence[_core.LayerCache]) -> list[_core.Sight] | None:
        """As Guesser."""
        if self._has_rule:
            return None
        found = []
        for layer, of_both in enumerate(zip(caches, [*caches[1:], None], strict=True)):
            gates = self._start[layer], self._before(layer), self._next[layer]
            sight = self._backend.make_sight(odds, layer, gates, of_both)
            if sight is None:
                return None
            found.append(sight)
        return found

    def _before(self, layer: int) -> Gate[A] | None:
        return self._next[layer - 1] if layer else None

    def _ranked(self, layer: int, x: A, gate: Gate[A]) -> Ranking:
        if not self._has_rule:
            return gate.guess(x)
        ranking = ranking_scores(gate.scores(x), self._layers[layer].router.correction_E, self._moe)
        return ranked_margins(ranking, self._moe.num_experts_per_tok, self.width)


def own_gates(layers: Sequence[MoeWeights]) -> Iterator[tuple[str, GateArrays]]:
    """The routers themselves, by name, one after the other. Embedded tokens alone say nothing to the first one."""
    for layer, (one, following) in enumerate(pairwise(layers)):
        yield next_gate(layer), own_gate(one.norm, following)
        yield start_gate(layer + 1), own_gate(following.norm, following)


def own_gate(norm: Norm, target: MoeWeights) -> GateArrays:
    """The target's router as a function of a state that went through ``norm`` instead of the target's own."""
    router, weight_D = target.router, norm.weight
    small = np.abs(weight_D) < 1e-3 * np.abs(weight_D).max()
    ratio_D = np.where(small, 0, target.norm.weight / np.where(small, 1, weight_D))
    shift_D = (0 if target.norm.bias is None else target.norm.bias) - ratio_D * (0 if norm.bias is None else norm.bias)
    bias_E = router.weight_ED @ np.broadcast_to(shift_D, ratio_D.shape) + (
        0 if router.bias_E is None else router.bias_E
    )
    matrix_ED = router.weight_ED if norm is target.norm else (router.weight_ED * ratio_D).astype(np.float32, copy=False)
    return GateArrays(matrix_ED, bias_E.astype(np.float32))


def has_rule(moe: MoeConfig) -> bool:
    """True if the experts chosen are not simply those with the highest logits."""
    return moe.num_groups > 1 or moe.has_correction_bias


def ranking_scores(logits_TE: F32Array, correction_E: F32Array | None, moe: MoeConfig) -> F32Array:
    """Finite numbers in the order in which the router chooses."""
    if not has_rule(moe):
        return logits_TE
    scores = choice_scores(logits_TE, correction_E, moe)
    is_open = np.isfinite(scores)
    ranking: F32Array = np.where(is_open, scores, scores[is_open].min() - 1).astype(np.float32)
    return ranking
