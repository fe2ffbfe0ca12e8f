"""What the operations of a backend are given: a step, its KV pages, weights, and layers made of them. Shapes: T tokens of this
step (all sequences together), D hidden, R rows whose logits are wanted, E experts, K experts per token, H heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tidegate.model_config import AttentionConfig, MoeConfig, RopeConfig
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout

if TYPE_CHECKING:
    from tidegate import _core

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
class AttentionHalf:
    """Grouped attention as a layer has it: norm, one projection to q, k and v, ``attend``, output projection."""

    norm: Norm
    qkv: Linear
    attention: AttentionWeights
    out: Linear


@dataclass(frozen=True)
class Router:
    """Router matrix float32 [E, D] (never quantized), its optional biases [E], and the contract."""

    weight_ED: F32Array
    bias_E: F32Array | None
    correction_E: F32Array | None
    config: MoeConfig


@dataclass(frozen=True)
class Routing:
    """``topk_expert_ids_TK`` int32 and ``topk_weights_TK`` float32, plain numpy. Best first, by the score that chose (the
    correction bias included), so weights need not descend. ``said_E``: the mean of the rows' logits, if the backend tells."""

    topk_expert_ids_TK: I32Array
    topk_weights_TK: F32Array
    said_E: F32Array | None = None


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
class DecoderLayer:
    """A layer of grouped attention and routed experts, and no shared one; ``cache`` of the experts, as in ``run_moe``."""

    attention: AttentionHalf
    moe: MoeLayer
    cache: _core.LayerCache
