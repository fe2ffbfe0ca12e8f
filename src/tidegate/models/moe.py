"""The Mixture-of-Experts half of a layer: where routing, the expert cache and the kernels meet.

    route      the router chooses K experts for every token
    visit      the cache pins the ones that are here and starts loading the others
    shared     the shared expert is computed while they load
    look ahead the gates of the next layers guess from this layer's hidden state, and the best guesses are loaded too
    moe        the backend computes hits first, then each miss as it arrives

Experts outer, tokens inner: however many tokens the step has, an expert is loaded once for all of them. When the layer
needs more experts than it has slots, the cache yields them in several placements, and each slot is reused only after
the backend has moved on to the next.

T tokens of the step, D hidden, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic

from tidegate.backends.base import A, Backend, ExpertSlots
from tidegate.experts.cache import ExpertCache
from tidegate.experts.lookahead import REACH, Lookahead
from tidegate.experts.trace import TraceWriter
from tidegate.models.weights import MoeWeights
from tidegate.quant.layout import ExpertLayout

Activation = tuple[str, float, float]  # name, alpha, limit of ModelConfig


@dataclass
class Experts:
    """The routed experts of a model: which are in memory, where, and how a blob is laid out in each MoE layer.

    ``trace``, if set, records the routing; whoever sets it begins and ends its steps around ``Decoder.forward``.
    ``lookahead``, if set, prefetches.
    """

    cache: ExpertCache
    slots: ExpertSlots
    layouts: Sequence[ExpertLayout]
    trace: TraceWriter | None = None
    lookahead: Lookahead | None = None


class MoeBlock(Generic[A]):
    """One MoE layer. ``following``: the MoE layers after it, for prefetch."""

    def __init__(
        self,
        weights: MoeWeights,
        activation: Activation,
        backend: Backend[A],
        experts: Experts,
        following: Sequence[MoeWeights] = (),
    ) -> None:
        self._weights, self._activation, self._following = weights, activation, following[:REACH]
        self._backend, self._experts = backend, experts
        self._layout = experts.layouts[weights.layer]

    def __call__(self, x: A) -> A:
        """[T, D] -> [T, D], to be added to x. Raises ReadFailed or CorruptFile if an expert cannot be read; the cache is
        consistent then."""
        backend, weights, experts = self._backend, self._weights, self._experts
        residual = x
        x = backend.norm(x, weights.norm)
        routing = backend.route(x, weights.router)
        if experts.trace is not None:
            hidden_TD = backend.numpy(x) if experts.trace.meta.sketch_dims else None
            experts.trace.record(routing.topk_expert_ids_TK, routing.topk_weights_TK, hidden_TD)

        rows = routing.topk_expert_ids_TK.tolist()
        needed = sorted(set().union(*rows))
        placements = experts.cache.visit(weights.layer, needed, rows)
        try:
            first = next(placements)  # the loads are on their way from here on
            self._look_ahead(residual, rows)
            shared = self._shared(x)
            everything = chain((first,), placements)
            out = backend.moe(x, routing, self._layout, everything, experts.slots, self._activation)
        finally:
            placements.close()  # unpins whatever an error left pinned

        if shared is None:
            return out
        if weights.shared_gate is None:
            return backend.add(out, shared)
        return backend.add_gated(out, shared, x, weights.shared_gate)

    def _look_ahead(self, residual: A, rows: list[list[int]]) -> None:
        """What the gates of the next layers say of a hidden state that this layer has not changed yet. A trace wants to know
        in any case."""
        backend, layer = self._backend, self._weights.layer
        lookahead, trace = self._experts.lookahead, self._experts.trace
        if lookahead is not None:
            if layer == 0:
                lookahead.begin_step(len(rows))
            lookahead.after_route(layer, set().union(*rows))
        is_wanted = lookahead is not None and lookahead.wants_guesses
        is_traced = trace is not None and trace.meta.guess_reach > 0
        if not is_wanted and not is_traced:
            return
        for distance, weights in enumerate(self._following, start=1):
            mark = backend.mark()
            guess = backend.route(backend.norm(residual, weights.norm), weights.router)
            backend.release(mark)
            if trace is not None and is_traced:
                trace.record_guess(weights.layer, distance, guess.topk_expert_ids_TK)
            if lookahead is not None and is_wanted:
                for ranked in guess.topk_expert_ids_TK.tolist():
                    lookahead.foresee(weights.layer, distance, ranked)

    def _shared(self, x: A) -> A | None:
        weights = self._weights
        if weights.shared_gate_up is None or weights.shared_down is None:
            return None
        return self._backend.gated_mlp(x, weights.shared_gate_up, weights.shared_down, self._activation)
