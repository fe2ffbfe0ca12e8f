"""The operations the decoder is written against. A backend owns its array type: the decoder passes arrays through
and never looks inside. Shapes: T tokens of this step (all sequences together), D hidden, V vocabulary, R rows whose
logits are wanted, E experts, K experts per token, F expert width.

Contract of every operation: a token's result does not depend on what else is in the call (batch invariance).
Arrays returned live until ``release(mark)`` with an earlier mark, or until the next ``begin``; ops never alias their
inputs unless they say so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from tidegate.backends.operands import (
    AttentionHalf,
    AttentionWeights,
    ByteArray,
    DecoderLayer,
    ExpertSlots,
    F32Array,
    KvLayout,
    Linear,
    MoeLayer,
    Norm,
    Router,
    Routing,
    StepBatch,
)
from tidegate.experts.base import Placement
from tidegate.quant.layout import ExpertLayout

if TYPE_CHECKING:
    from tidegate import _core

A = TypeVar("A")
Ranking = tuple[list[list[int]], list[list[float]]]
LARGEST_MARGIN = 8.0


class Gate(ABC, Generic[A]):
    """A linear gate on a hidden state, behind a norm if there is one, that guesses at a router. Its bias follows what the router
    says beyond it: it starts as if a few tokens had told it already, and the latest ones count most. Leaves nothing in the
    workspace."""

    @abstractmethod
    def scores(self, x: A) -> F32Array:
        """[T, D] -> [T, E], plain numpy."""

    @abstractmethod
    def guess(self, x: A) -> Ranking:
        """``Backend.rank`` of the scores."""

    @abstractmethod
    def follow(self, heard_E: F32Array) -> None:
        """What the router said, on average over the rows that this gate has scored last."""


class Backend(ABC, Generic[A]):
    """See the module docstring for the contract. What it is given is in operands.py."""

    @abstractmethod
    def bind_kv(self, layout: KvLayout, pages: ByteArray) -> None:
        """Give the backend its KV pages: uint8 [num_pages * layout.page_bytes], 64-byte aligned."""

    @abstractmethod
    def begin(self, batch: StepBatch) -> None:
        """Start a step: remembers positions and page tables, frees every array of the step before."""

    @abstractmethod
    def mark(self) -> int:
        """Current workspace level, for ``release``."""

    @abstractmethod
    def release(self, mark: int) -> None:
        """Free every array made since ``mark``."""

    @abstractmethod
    def embed(self, table: Linear, multiplier: float) -> A:
        """[T, D]: rows of the packed table for the step's token ids, dequantized, times ``multiplier``."""

    @abstractmethod
    def norm(self, x: A, norm: Norm) -> A:
        """[T, n] -> [T, n]."""

    @abstractmethod
    def linear(self, x: A, weight: Linear) -> A:
        """[T, k] -> [T, n]; adds the bias if there is one."""

    @abstractmethod
    def attend(self, qkv: A, weights: AttentionWeights) -> A:
        """GQA. qkv [T, (H + KV) * head_dim + KV * v_head_dim] -> [T, H * v_head_dim]: norms q and k, clips q, k and v (in
        that order, as OLMoE does), rotates, writes K and V into the step's pages, attends causally over everything cached.
        A window of w lets a token see itself and the w - 1 tokens before it; a sink is one more logit of the softmax."""

    def attention(self, x: A, half: AttentionHalf) -> A:
        """[T, D] -> [T, D], in one call where calls cost."""
        return self.linear(self.attend(self.linear(self.norm(x, half.norm), half.qkv), half.attention), half.out)

    @abstractmethod
    def attend_latent(self, q: A, kv: A, weights: AttentionWeights) -> A:
        """MLA. q [T, H * (nope + rope)], kv [T, kv_lora_rank + rope] -> [T, H * v_head_dim]: norms the latent, rotates, writes
        it, absorbs k_up into the query, attends in the latent space, applies v_up."""

    @abstractmethod
    def route(self, x: A, router: Router) -> Routing:
        """[T, D] -> the chosen experts. Ties are broken towards the lower expert id."""

    def norm_route(self, x: A, norm: Norm, router: Router) -> tuple[A, Routing]:
        """``norm`` and what ``route`` says of it, likewise."""
        normed = self.norm(x, norm)
        return normed, self.route(normed, router)

    @abstractmethod
    def rank(self, scores: A, top_k: int, most: int) -> Ranking:
        """[T, E] -> for each row the ``most`` best experts, best first, ties towards the lower id, and their margins: how far
        each is above the edge, the middle between the last of ``top_k`` and the first after it, in standard deviations of the
        row, at most LARGEST_MARGIN either way, in steps of 1/256 (which float16 holds)."""

    def make_gate(self, linear: Linear, norm: Norm | None, top_k: int, most: int) -> Gate[A]:
        """A gate whose bias, which moves, is that of ``linear``. Its guesses are those of ``rank``."""
        return _PlainGate(self, linear, norm, top_k, most)

    def make_sight(
        self,
        odds: _core.Odds,
        layer: int,
        gates: tuple[Gate[A] | None, Gate[A] | None, Gate[A] | None],
        caches: tuple[_core.LayerCache, _core.LayerCache | None],
    ) -> _core.Sight | None:
        """What steps of one token guess about MoE layer ``layer`` and from it and load ahead, in one call each; None where calls
        cost nothing. ``gates``: from the layer's start and from the router before it, both at its router, and from there at the
        next one; ``caches`` of this layer and of the next."""
        return None

    @abstractmethod
    def moe(
        self,
        x: A,
        routing: Routing,
        layout: ExpertLayout,
        placements: Iterable[Placement],
        slots: ExpertSlots,
        activation: tuple[str, float, float],
    ) -> A:
        """[T, D] -> [T, D]: sum over k = 0..K-1, in that order, of weight * expert(x). ``placements`` is lazy: each is
        acquired when the iterator advances and may be evicted after the next advance; together they hold every needed
        expert once. ``activation`` = (name, alpha, limit) of ModelConfig."""

    def run_moe(
        self, x: A, layer: MoeLayer, cache: _core.LayerCache, sight: _core.Sight | None
    ) -> tuple[A, A | None, A | None, _core.Routed | None] | None:
        """``norm_route``, a visit of ``cache``, ``sight``'s guesses and ``moe`` in one call: ``x`` normed, the sum, and what the
        shared expert made of it. No sum, but the rest of the story, if the cache does not serve such steps, then nothing was
        visited, or if a load has failed. None, and nothing done, where calls cost nothing."""
        return None

    def run_layers(
        self, x: A, layers: tuple[DecoderLayer, ...], scale: float, sights: Sequence[_core.Sight] = ()
    ) -> tuple[int, int]:
        """``x`` += ``scale`` * y in one call, for what the layers' halves, ``attention`` and ``run_moe`` in turn, make of x, up
        to the first without a sum: how many halves were done, and the slot whose load has failed, or -1. ``sights``: of every
        layer, or none. Nothing is done where calls cost nothing."""
        return 0, -1

    @abstractmethod
    def gated_mlp(self, x: A, gate_up: Linear, down: Linear, activation: tuple[str, float, float]) -> A:
        """[T, D] -> [T, D]: down(act(gate) * up) with gate = rows :n/2 of gate_up, up = the rest."""

    @abstractmethod
    def add(self, x: A, y: A, scale: float = 1.0) -> A:
        """x += scale * y, in place; returns x."""

    @abstractmethod
    def add_gated(self, x: A, y: A, gate_input: A, gate: Linear) -> A:
        """x += sigmoid(gate(gate_input)) * y per token (Qwen2-MoE's shared expert), in place; returns x."""

    def numpy(self, x: A) -> F32Array:
        """A copy as float32 [T, D], for traces and tests: slow."""
        return np.array(x, np.float32)

    def view(self, x: A) -> F32Array:
        """The same to be read at once, before anything else is computed; no copy where there need be none."""
        return self.numpy(x)

    @abstractmethod
    def logits(self, x: A, norm: Norm, head: Linear, divisor: float) -> F32Array:
        """[T, D] -> float32 [R, V] of the step's logit rows: norm, head, divide. A plain numpy array owned by the caller
        until the next step."""


_TOLD_BEFORE, _LEAST_SHARE = 4, 1 / 16


class _PlainGate(Gate[A]):
    """In the backend's own operations."""

    def __init__(self, backend: Backend[A], linear: Linear, norm: Norm | None, top_k: int, most: int) -> None:
        assert linear.bias is not None
        self._backend, self._linear, self._norm, self._bias_E = backend, linear, norm, linear.bias
        self._top_k, self._most = top_k, most
        self._said_E, self._rows, self._told = np.zeros(linear.n, np.float32), 1, _TOLD_BEFORE

    def scores(self, x: A) -> F32Array:
        backend = self._backend
        mark = backend.mark()
        scores = backend.numpy(self._ask(x))
        backend.release(mark)
        return scores

    def guess(self, x: A) -> Ranking:
        backend = self._backend
        mark = backend.mark()
        ranking = backend.rank(self._ask(x), self._top_k, self._most)
        backend.release(mark)
        return ranking

    def follow(self, heard_E: F32Array) -> None:
        share = max(_LEAST_SHARE, 1 / self._told)
        self._told += self._rows
        self._bias_E += np.float32(1 - (1 - share) ** self._rows) * (heard_E - self._said_E)

    def _ask(self, x: A) -> A:
        backend = self._backend
        scores = backend.linear(x if self._norm is None else backend.norm(x, self._norm), self._linear)
        said_TE = backend.numpy(scores)
        self._said_E, self._rows = said_TE.mean(axis=0), len(said_TE)
        return scores
