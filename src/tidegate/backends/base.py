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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tidegate.experts.base import Placement
from tidegate.model_config import AttentionConfig, MoeConfig, RopeConfig
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout

if TYPE_CHECKING:
    from tidegate import _core

A = TypeVar("A")
ByteArray = NDArray[np.uint8]
F32Array = NDArray[np.float32]
I32Array = NDArray[np.int32]


@dataclass(frozen=True)
class StepBatch:
    """What one forward pass computes. Tokens of a sequence are consecutive and in order of position.

    token_ids_T, positions_T, sequence_T (row of block_tables) int32; block_tables int32 [sequences, max pages]:
    KV page number of each run of ``page_tokens`` positions; logit_rows_R int32: the rows of T whose logits are wanted.
    """

    token_ids_T: I32Array
    positions_T: I32Array
    sequence_T: I32Array
    block_tables: I32Array
    logit_rows_R: I32Array


@dataclass(frozen=True)
class KvLayout:
    """Bytes of one KV page: ``page_tokens`` positions of every layer of one sequence.

    Page = [layers][K area | V area]; K area = [kv_heads][k_dim][page_tokens] (keys are the lanes of a vector, so scores need
    no sums across lanes), V area = [kv_heads][page_tokens][v_dim]. MLA: kv_heads 1, k_dim = kv_lora_rank + rope dims, v_dim 0
    and the K area is [page_tokens][k_dim]: values are the first kv_lora_rank numbers of the keys.
    Numbers that float16 cannot hold are stored as its largest finite value. int8: behind each head's part of an area follow
    page_tokens float32 scales; number = code * scale, the largest code of a position is 127.
    """

    num_layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str = "f16"  # or "f32", "int8"
    page_tokens: int = 16

    @property
    def token_bytes(self) -> int:
        scale_bytes = 0 if self.dtype != "int8" else 8 if self.v_dim else 4
        number_bytes = {"f32": 4, "f16": 2, "int8": 1}[self.dtype]
        return self.num_layers * self.kv_heads * ((self.k_dim + self.v_dim) * number_bytes + scale_bytes)

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.token_bytes

    @staticmethod
    def of(attention: AttentionConfig, rope: RopeConfig, num_layers: int, dtype: str = "f16") -> KvLayout:
        if attention.is_mla:
            return KvLayout(num_layers, 1, attention.kv_lora_rank + rope.dims, 0, dtype)
        return KvLayout(num_layers, attention.num_kv_heads, attention.head_dim, attention.v_head_dim, dtype)


@dataclass(frozen=True)
class Linear:
    """A packed weight [n, k] in the arena (uint8, 64-byte aligned) with an optional float32 bias [n].

    ``wide_inputs`` (integer formats): inputs are taken as int8 codes plus the int8 codes of what those leave, about 16 bits.
    Backends keep what they make of it under the object's identity, so make it once and keep it.
    """

    name: str
    packed: ByteArray
    fmt: Format
    n: int
    k: int
    bias: F32Array | None = None
    wide_inputs: bool = False


@dataclass(frozen=True)
class Norm:
    """RMSNorm (bias None) or LayerNorm weights, float32 [D]."""

    weight: F32Array
    bias: F32Array | None
    eps: float
    kind: str = "rms"


@dataclass(frozen=True)
class Rope:
    """Rotary table of a model (models/rope.py makes it): pair i of the first ``dims`` numbers of a head, at position p,
    turns by the float32 angle float32(p) * inv_freq[i]; cosine and sine are both multiplied by ``factor``.

    inv_freq float32 [dims / 2]. Pairs are (i, i + dims/2), or (2i, 2i + 1) when ``interleaved``. MLA rotates the last
    ``dims`` numbers of each query head and of the kv row.
    """

    inv_freq: F32Array
    factor: float = 1.0
    interleaved: bool = False

    @property
    def dims(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class AttentionWeights:
    """What ``attend`` needs besides its inputs. ``index`` is the layer (its place in a KV page)."""

    index: int
    config: AttentionConfig
    rope: Rope
    window: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks_H: F32Array | None = None
    kv_norm: Norm | None = None  # MLA: norm of the latent
    k_up: Linear | None = None  # MLA: [H * kv_lora_rank, qk_nope_dim], head h maps a query into the latent
    v_up: Linear | None = None  # MLA: [H * v_head_dim, kv_lora_rank]


@dataclass(frozen=True)
class Router:
    """Router matrix float32 [E, D] (never quantized), its optional biases [E], and the contract."""

    weight_ED: F32Array
    bias_E: F32Array | None
    correction_E: F32Array | None
    config: MoeConfig


@dataclass(frozen=True)
class Routing(Generic[A]):
    """``topk_expert_ids_TK`` int32 and ``topk_weights_TK`` float32, plain numpy. Best first, by the score that chose (the
    correction bias included), so weights need not descend. ``said_E``: the mean of the rows' logits, if the backend tells."""

    topk_expert_ids_TK: I32Array
    topk_weights_TK: F32Array
    said_E: F32Array | None = None


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


class ExpertSlots(ABC):
    """The slots of the arena as a backend sees them.

    ``native`` is the same for native code, which waits by itself and calls ``wait`` for the error when it got a null
    pointer; None for slots that only numpy reads.
    """

    native: _core.SlotSource | None = None

    @abstractmethod
    def wait(self, slot: int) -> ByteArray:
        """Block until the slot is ready; its bytes (a view). Raises ReadFailed if the load failed."""


@dataclass(frozen=True)
class MoeLayer:
    """A layer of routed experts, but for those, and its shared expert if it has one."""

    norm: Norm
    router: Router
    layout: ExpertLayout
    activation: tuple[str, float, float]
    shared_gate_up: Linear | None = None
    shared_down: Linear | None = None


@dataclass(frozen=True)
class LayerAtHand:
    """A layer of grouped attention and routed experts; ``book`` as in ``moe_at_hand``, or ``cache`` as in ``run_moe``."""

    attention_norm: Norm
    qkv: Linear
    attention: AttentionWeights
    out: Linear
    moe_norm: Norm
    router: Router
    layout: ExpertLayout
    book: _core.LayerBook
    cache: _core.LayerCache | None = None


@dataclass(frozen=True)
class LayersAtHand:
    """The layers of a model, in order, and what they have in common. ``scale``: of what a half adds to the hidden state."""

    layers: tuple[LayerAtHand, ...]
    slots: ExpertSlots
    activation: tuple[str, float, float]
    scale: float


class Backend(ABC, Generic[A]):
    """See the module docstring for the contract. Weights are passed as the dataclasses above."""

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

    def attention(self, x: A, norm: Norm, qkv: Linear, weights: AttentionWeights, out: Linear) -> A:
        """[T, D] -> [T, D]: norm, projection to q, k and v, ``attend``, output projection. In one call where calls cost."""
        return self.linear(self.attend(self.linear(self.norm(x, norm), qkv), weights), out)

    @abstractmethod
    def attend_latent(self, q: A, kv: A, weights: AttentionWeights) -> A:
        """MLA. q [T, H * (nope + rope)], kv [T, kv_lora_rank + rope] -> [T, H * v_head_dim]: norms the latent, rotates, writes
        it, absorbs k_up into the query, attends in the latent space, applies v_up."""

    @abstractmethod
    def route(self, x: A, router: Router) -> Routing[A]:
        """[T, D] -> the chosen experts. Ties are broken towards the lower expert id."""

    def norm_route(self, x: A, norm: Norm, router: Router) -> tuple[A, Routing[A]]:
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
        routing: Routing[A],
        layout: ExpertLayout,
        placements: Iterable[Placement],
        slots: ExpertSlots,
        activation: tuple[str, float, float],
    ) -> A:
        """[T, D] -> [T, D]: sum over k = 0..K-1, in that order, of weight * expert(x). ``placements`` is lazy: each is
        acquired when the iterator advances and may be evicted after the next advance; together they hold every needed
        expert once. ``activation`` = (name, alpha, limit) of ModelConfig."""

    def moe_at_hand(
        self,
        x: A,
        norm: Norm,
        router: Router,
        layout: ExpertLayout,
        slots: ExpertSlots,
        book: _core.LayerBook,
        activation: tuple[str, float, float],
    ) -> tuple[A, A, int] | None:
        """``norm_route`` and ``moe`` in one call: ``x`` normed, the sum, and of how many experts; ``book`` says where each
        expert is. None, and nothing done, if one of them is not ready or was never used, or where calls cost nothing."""
        return None

    def run_moe(
        self, x: A, layer: MoeLayer, cache: _core.LayerCache, sight: _core.Sight | None
    ) -> tuple[A, A | None, A | None, _core.Routed | None] | None:
        """``norm_route``, a visit of ``cache``, ``sight``'s guesses and ``moe`` in one call: ``x`` normed, the sum, and what the
        shared expert made of it. No sum, but the rest of the story, if the cache does not serve such steps, then nothing was
        visited, or if a load has failed. None, and nothing done, where calls cost nothing."""
        return None

    def run_at_hand(self, x: A, layers: LayersAtHand, sights: Sequence[_core.Sight] = ()) -> tuple[int, int, int]:
        """``x`` through the layers' halves in one call, ``attention`` and ``moe_at_hand`` or ``run_moe`` in turn, up to the first
        that would be None or without a sum: how many halves were done, of how many experts that no cache has counted, and the
        slot whose load has failed, or -1. ``sights``: of every layer, or none. Changes x. Nothing is done where calls cost
        nothing."""
        return 0, 0, -1

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
