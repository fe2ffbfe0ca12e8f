"""One description of every supported decoder. models/families.py makes it from a checkpoint's config; nothing else reads
Hugging Face keys. It is stored in the expert store's manifest as plain JSON (``to_json`` / ``from_json``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]
RopeScaling = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. ``dims`` leading dimensions of a head rotate (partial rotary); MLA rotates its rope part.

    ``interleaved``: pairs are (2i, 2i+1) instead of (i, i + dims/2). ``params`` holds the scaling's own numbers under
    Hugging Face's names (factor, low_freq_factor, beta_fast, attention_factor, short_factor, mscale, truncate, ...).
    """

    dims: int
    theta: float = 10000.0
    interleaved: bool = False
    scaling: RopeScaling = "default"
    original_max_positions: int = 0
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention, or multi-head latent attention when ``kv_lora_rank`` > 0.

    GQA: qkv rows are [num_heads*head_dim | num_kv_heads*head_dim | num_kv_heads*v_head_dim].
    MLA: per head qk_nope_dim + rope.dims query dims and v_head_dim value dims; the cache holds kv_lora_rank + rope.dims
    numbers a token, shared by all heads (absorbed form). ``q_lora_rank`` 0 means a direct q projection.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    qk_norm: Literal["none", "head", "full"] = "none"  # per head (Qwen3) or over the whole projection (OLMoE)
    clip_qkv: float | None = None  # OLMoE
    has_sinks: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_dim: int = 0

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts and how they are chosen.

    ``scoring``: how logits become weights. "softmax" over all experts before top-k; "topk_softmax" over the chosen
    ones (Mixtral and Granite and gpt-oss contract); "sigmoid" (DeepSeek-V3, GLM-4); "sparsemixer" (PhiMoE).
    ``normalize_topk`` divides the chosen weights by their sum; ``routed_scaling`` multiplies them afterwards.
    ``group_score``: how a group of experts is ranked when num_groups > 1 ("max": DeepSeek-V2, "top2_sum": V3).
    """

    num_experts: int
    num_experts_per_tok: int
    expert_dim: int
    scoring: Literal["softmax", "topk_softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalize_topk: bool = False
    routed_scaling: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    has_router_bias: bool = False  # added to the logits (gpt-oss)
    has_correction_bias: bool = False  # added for choosing only (DeepSeek-V3, GLM-4)
    has_expert_bias: bool = False
    router_jitter: float = 0.0  # sparsemixer's threshold
    shared_dim: int = 0  # width of the shared expert(s) together; 0: none
    has_shared_gate: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. ``moe_layers[l]`` and ``windows[l]`` (0: full attention) say what layer l is."""

    family: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    attention: AttentionConfig
    rope: RopeConfig
    moe: MoeConfig | None
    moe_layers: tuple[bool, ...]
    windows: tuple[int, ...]
    dense_dim: int = 0  # feed-forward width of layers without experts
    activation: Activation = "silu"
    activation_alpha: float = 1.702  # clamped_swiglu
    activation_limit: float = 7.0
    norm: Literal["rms", "layer"] = "rms"
    has_attention_bias: bool = False  # on q, k, v
    has_output_bias: bool = False  # on o
    has_head_bias: bool = False
    tied_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> ModelConfig:
        """Inverse of to_json. Raises TypeError on missing or unknown keys (the manifest is checked before)."""
        moe = data["moe"]
        return ModelConfig(
            **{
                **data,
                "attention": AttentionConfig(**data["attention"]),
                "rope": RopeConfig(**data["rope"]),
                "moe": None if moe is None else MoeConfig(**moe),
                "moe_layers": tuple(data["moe_layers"]),
                "windows": tuple(data["windows"]),
                "eos_token_ids": tuple(data["eos_token_ids"]),
            }
        )

    @property
    def num_moe_layers(self) -> int:
        return sum(self.moe_layers)
