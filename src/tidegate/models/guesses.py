"""Who guesses what the next routers will choose: their own gates on an earlier hidden state, or a predictor fitted to that.

T tokens of the step, D hidden, L layers that a source speaks of, E experts, G experts of a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tidegate.backends.base import A, Backend, F32Array, Linear
from tidegate.backends.reference_math import choice_scores
from tidegate.experts.lookahead import REACH
from tidegate.model_config import MoeConfig
from tidegate.models.weights import MoeWeights

IdArray = NDArray[np.integer[Any]]
Input_contra = TypeVar("Input_contra", contravariant=True)


@dataclass(frozen=True)
class Guess:
    """For every row of the step the experts that ``layer``, ``distance`` layers ahead, would choose, best first, and perhaps
    more; and their margins, as Lookahead wants them."""

    layer: int
    distance: int
    experts_TG: IdArray
    margins_TG: F32Array | None = None


class Guesser(Protocol[Input_contra]):
    """Asked by the decoder in steps that want guesses. Arrays made on the way are the caller's to release. ``width``: the most
    experts of a guess."""

    width: int

    def before(self, x: Input_contra) -> Iterator[Guess]:
        """``x`` [T, D]: the embedded tokens, before the first layer."""

    def after(self, layer: int, x: Input_contra, residual: Input_contra) -> Iterator[Guess]:
        """``x`` [T, D] is what the router of ``layer`` saw, ``residual`` the hidden state that it is the norm of."""


class OwnGates(Generic[A]):
    """Needs no fitting: the next routers, with their own norms, on a hidden state that this layer has not changed yet."""

    def __init__(self, backend: Backend[A], layers: Sequence[MoeWeights]) -> None:
        self._backend, self._layers = backend, layers
        self.width = layers[0].router.config.num_experts_per_tok

    def before(self, x: A) -> Iterator[Guess]:
        """Embedded tokens alone say nothing to a gate."""
        return iter(())

    def after(self, layer: int, x: A, residual: A) -> Iterator[Guess]:
        backend = self._backend
        for distance, weights in enumerate(self._layers[layer + 1 : layer + 1 + REACH], start=1):
            mark = backend.mark()
            routing = backend.route(backend.norm(residual, weights.norm), weights.router)
            backend.release(mark)
            yield Guess(weights.layer, distance, routing.topk_expert_ids_TK)


class FittedGates(Generic[A]):
    """One matrix a source: source 0 are the embedded tokens, source l + 1 is what the router of MoE layer l saw. Source i
    speaks of layers i and i + 1."""

    def __init__(
        self, backend: Backend[A], layers: Sequence[MoeWeights], sources: Sequence[Linear], moe: MoeConfig
    ) -> None:
        self._backend, self._layers, self._sources, self._moe = backend, layers, sources, moe
        self.width = min(2 * moe.num_experts_per_tok, moe.num_experts)

    def before(self, x: A) -> Iterator[Guess]:
        return self._guess(0, self._backend.norm(x, self._layers[0].norm))

    def after(self, layer: int, x: A, residual: A) -> Iterator[Guess]:
        return self._guess(layer + 1, x) if layer + 1 < len(self._sources) else iter(())

    def _guess(self, source: int, x: A) -> Iterator[Guess]:
        linear, moe = self._sources[source], self._moe
        layers = range(source, source + linear.n // moe.num_experts)
        scores_TLE = self._backend.numpy(self._backend.linear(x, linear)).reshape(-1, len(layers), moe.num_experts)
        if has_rule(moe):
            corrections = [self._layers[layer].router.correction_E for layer in layers]
            ranked = [ranking_scores(scores_TLE[:, i], one, moe) for i, one in enumerate(corrections)]
            scores_TLE = np.stack(ranked, axis=1)
        ids, margins = ranked_margins(scores_TLE.reshape(-1, moe.num_experts), moe.num_experts_per_tok, self.width)
        for index, layer in enumerate(layers):
            yield Guess(layer, index + 1, ids[index :: len(layers)], margins[index :: len(layers)])


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


def ranked_margins(scores_TE: F32Array, per_token: int, most: int) -> tuple[IdArray, F32Array]:
    """The ``most`` best experts of each row, best first, and how far each is above the edge: the middle between the last chosen
    and the first not chosen."""
    num_experts = scores_TE.shape[1]
    ids = np.argpartition(scores_TE, num_experts - most, axis=1)[:, num_experts - most :]
    rows = np.arange(len(ids))[:, None]
    best = scores_TE[rows, ids]
    order = np.argsort(-best, axis=1)
    ids, best = ids[rows, order], best[rows, order]
    edge = best[:, per_token - 1] + best[:, min(per_token, most - 1)]
    margins: F32Array = best - 0.5 * edge[:, None]
    return ids, margins
