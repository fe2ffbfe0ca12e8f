"""The Mixture-of-Experts half of a layer: where routing, the expert cache and the kernels meet.

    route      the router chooses K experts for every token
    visit      the cache pins the ones that are here and starts loading the others
    shared     the shared expert is computed while they load
    look ahead a guesser tells from this layer's hidden state what the next router will choose, and before the attention it has
               told the same of this one; or a predictor tells it from what they chose before; good guesses are loaded too
    moe        the backend computes hits first, then each miss as it arrives

Experts outer, tokens inner: however many tokens the step has, an expert is loaded once for all of them. When the layer
needs more experts than it has slots, the cache yields them in several placements, and each slot is reused only after
the backend has moved on to the next. Where nobody looks on but sights, steps of few tokens are one call of the backend,
and so are all steps where every expert has a slot.

T tokens of the step, D hidden, K experts per token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Protocol

from tidegate.backends.base import A, Backend
from tidegate.backends.operands import ExpertSlots, F32Array, I32Array, MoeLayer, Routing
from tidegate.experts.cache import ExpertCache
from tidegate.experts.foreseer import Foreseer
from tidegate.experts.lookahead import OWN_CURVES, Curve, Lookahead
from tidegate.models.guesses import Guess, Guesser
from tidegate.models.weights import MoeWeights
from tidegate.quant.layout import ExpertLayout

if TYPE_CHECKING:
    from tidegate import _core

Activation = tuple[str, float, float]  # name, alpha, limit of ModelConfig


class RoutingRecorder(Protocol):
    """A trace, as far as the layers know it."""

    @property
    def wants_hidden(self) -> bool: ...
    @property
    def wants_guesses(self) -> bool: ...

    def record(self, topk_expert_ids_TK: I32Array, topk_weights_TK: F32Array, hidden_TD: F32Array | None) -> None:
        """Routing of the next MoE layer of the step, and what its router saw if that is wanted. Copies what it keeps."""

    def record_guess(self, guess: Guess) -> None:
        """A guess at a layer to come, if they are wanted."""


@dataclass
class Experts:
    """The routed experts of a model: which are in memory, where, and how a blob is laid out in each MoE layer.

    ``trace``, if set, records the routing; whoever sets it begins and ends its steps around ``Decoder.forward``.
    ``lookahead``, if set, prefetches what ``guesser`` says. ``curves``: the odds that ``lookahead`` starts from. ``foreseer``, if
    set, prefetches instead what a predictor says.
    ``visit_ns`` is what cache and policy have cost so far, ``guess_ns`` what guesses and prefetch have.
    """

    cache: ExpertCache
    slots: ExpertSlots
    layouts: Sequence[ExpertLayout]
    trace: RoutingRecorder | None = None
    lookahead: Lookahead | None = None
    guesser: Guesser[Any] | None = None
    curves: Sequence[Curve] = OWN_CURVES
    foreseer: Foreseer | None = None
    sights: Sequence[_core.Sight] | None = field(default=None, init=False)  # of the step's token, if guesses are wanted
    _is_native: bool = field(default=False, init=False)
    _visit_ns: int = field(default=0, init=False)
    _guess_ns: int = field(default=0, init=False)
    _seen: tuple[object, object, Sequence[_core.Sight] | None] = field(default=(None, None, None), init=False)

    @property
    def visit_ns(self) -> int:
        """See above."""
        return self._visit_ns + self.cache.native_counts.visit_ns

    @property
    def guess_ns(self) -> int:
        """See above."""
        return self._guess_ns + self.cache.native_counts.guess_ns

    def spent(self, visit_ns: int, guess_ns: int) -> None:
        """So much more."""
        self._visit_ns += visit_ns
        self._guess_ns += guess_ns

    def begin_rows(self, sequence_T: Sequence[int], token_T: Sequence[int]) -> None:
        """The rows of a step that starts: sequence ids and input token ids."""
        if self.foreseer is not None:
            began_ns = time.perf_counter_ns()
            self.foreseer.begin_step(sequence_T, token_T)
            self._guess_ns += time.perf_counter_ns() - began_ns

    def begin_step(self, num_rows: int) -> None:
        """A forward pass of so many rows starts."""
        began_ns = time.perf_counter_ns()
        lookahead = self.lookahead
        if lookahead is not None and lookahead.is_done:
            lookahead = self.lookahead = None
        if self.foreseer is not None and self.cache.is_complete:
            self.foreseer = None
        self.sights = None
        if lookahead is not None:
            lookahead.begin_step(num_rows)
            if num_rows == 1 and lookahead.wants_guesses and self.trace is None:
                self.sights = self._all_sights(lookahead)
        asks = lookahead is not None and lookahead.counts
        self._is_native = self.trace is None and self.foreseer is None and not (asks and self.sights is None)
        self._guess_ns += time.perf_counter_ns() - began_ns

    def _all_sights(self, lookahead: Lookahead) -> Sequence[_core.Sight] | None:
        """Made once for whoever looks and guesses."""
        guesser = self.guesser
        if self._seen[0] is not lookahead or self._seen[1] is not guesser:
            natives = lookahead.natives()
            found = None if guesser is None or natives is None else guesser.sights(lookahead.odds, natives)
            self._seen = lookahead, guesser, found
        return self._seen[2]

    @property
    def asked(self) -> Guesser[Any] | None:
        """The guesser, if anybody wants guesses in this step; a trace wants them in any case."""
        lookahead, trace = self.lookahead, self.trace
        wanted = (lookahead is not None and lookahead.wants_guesses) or (trace is not None and trace.wants_guesses)
        return self.guesser if wanted else None

    def runs_whole(self, num_rows: int) -> bool:
        """Whether a step of so many rows may run all layers in one call: nobody but sights wants to know what routers choose."""
        return self._is_native and not self.cache.is_prompt(num_rows)

    def native(self, layer: int) -> _core.LayerCache | None:
        """``ExpertCache.native``, if nobody wants to know what the router chooses but sights."""
        if not self._is_native:
            return None
        if layer == 0:
            self.cache.deal()
        return self.cache.native(layer)

    def raise_failure(self, slot: int) -> None:
        """Why the load into the slot failed; -1: none did."""
        if slot >= 0:
            self.slots.wait(slot)
            raise AssertionError(f"the load into slot {slot} failed, but wait() does not say why")

    def tell(self, guess: Guess | None) -> None:
        """Pass a guess on to whoever wants it."""
        if guess is None:
            return
        lookahead, trace = self.lookahead, self.trace
        if trace is not None and trace.wants_guesses:
            trace.record_guess(guess)
        if lookahead is not None and lookahead.wants_guesses:
            for ranked, margins in zip(guess.experts_TG, guess.margins_TG, strict=True):
                lookahead.foresee(guess.layer, guess.distance, ranked, margins)


class MoeBlock(Generic[A]):
    """One MoE layer."""

    def __init__(self, weights: MoeWeights, activation: Activation, backend: Backend[A], experts: Experts) -> None:
        self._weights, self._backend, self._experts = weights, backend, experts
        layout = experts.layouts[weights.layer]
        self.layer = MoeLayer(
            weights.norm, weights.router, layout, activation, weights.shared_gate_up, weights.shared_down
        )

    def __call__(self, x: A) -> A:
        """[T, D] -> [T, D], to be added to x. Raises ReadFailed or CorruptFile if an expert cannot be read; the cache is
        consistent then."""
        backend, weights, experts = self._backend, self._weights, self._experts
        native = experts.native(weights.layer)
        if native is not None:
            sights = experts.sights
            ran = backend.run_moe(x, self.layer, native, None if sights is None else sights[weights.layer])
            if ran is not None:
                x, total, shared, more = ran
                if total is not None:
                    return self._add_shared(total, shared, x)
                assert more is not None
                experts.raise_failure(more.failed_slot)
                return self._visit(x, Routing(*more.routing()))
        x, routing = backend.norm_route(x, weights.norm, weights.router)
        if experts.trace is not None:
            hidden_TD = backend.view(x) if experts.trace.wants_hidden else None
            experts.trace.record(routing.topk_expert_ids_TK, routing.topk_weights_TK, hidden_TD)
        return self._visit(x, routing)

    def at_start(self, x: A) -> None:
        """``x`` [T, D]: the hidden state that the layer's attention is about to read. Loads may be on their way from here on."""
        experts, layer = self._experts, self._weights.layer
        if experts.sights is not None:
            experts.sights[layer].at_start(x)
            return
        guesser = experts.asked
        if guesser is not None:
            began_ns = time.perf_counter_ns()
            experts.tell(guesser.at_start(layer, x))
            experts.spent(0, time.perf_counter_ns() - began_ns)

    def _visit(self, x: A, routing: Routing) -> A:
        """``x``: what the router saw."""
        backend, experts, layer = self._backend, self._experts, self._weights.layer
        began_ns = time.perf_counter_ns()
        rows = routing.topk_expert_ids_TK.tolist()
        needed = sorted(set().union(*rows))
        placements = experts.cache.visit(layer, needed, rows)
        try:
            first = next(placements)  # the loads are on their way from here on
            placed_ns = time.perf_counter_ns()
            self._look_ahead(x, routing, needed)
            experts.spent(placed_ns - began_ns, time.perf_counter_ns() - placed_ns)
            shared = self._shared(x)
            everything = chain((first,), placements)
            out = backend.moe(x, routing, self.layer.layout, everything, experts.slots, self.layer.activation)
        finally:
            began_ns = time.perf_counter_ns()
            placements.close()  # unpins whatever an error left pinned
            experts.spent(time.perf_counter_ns() - began_ns, 0)
        return self._add_shared(out, shared, x)

    def _look_ahead(self, x: A, routing: Routing, needed: list[int]) -> None:
        experts, backend, layer = self._experts, self._backend, self._weights.layer
        foreseer = experts.foreseer
        if foreseer is not None:
            sketch_TS = foreseer.sketch(backend.view(x)) if foreseer.wants_sketch else None
            foreseer.after_route(layer, needed, routing.topk_expert_ids_TK, sketch_TS)
        if experts.lookahead is not None:
            experts.lookahead.after_route(layer, needed)
        guesser = experts.asked
        if guesser is not None:
            experts.tell(guesser.after_route(layer, x, routing.said_E))

    def _shared(self, x: A) -> A | None:
        layer = self.layer
        if layer.shared_gate_up is None or layer.shared_down is None:
            return None
        return self._backend.gated_mlp(x, layer.shared_gate_up, layer.shared_down, layer.activation)

    def _add_shared(self, out: A, shared: A | None, x: A) -> A:
        if shared is None:
            return out
        if self._weights.shared_gate is None:
            return self._backend.add(out, shared)
        return self._backend.add_gated(out, shared, x, self._weights.shared_gate)
