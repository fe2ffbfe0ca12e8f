"""Pieces of a ModelConfig that several families share, read from config keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidegate.model_config import AttentionConfig, MoeConfig, RopeConfig
from tidegate.models.config_keys import MOST_EXPERTS, ConfigKeys
from tidegate.models.rope import yarn_scale


def grouped_attention(keys: ConfigKeys, **options: Any) -> AttentionConfig:
    heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    if not keys.has("head_dim") and hidden % heads:
        raise keys.error(f"head_dim is missing and hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    head_dim = keys.integer("head_dim", default=hidden // heads)
    kv_heads = keys.integer("num_key_value_heads", default=heads)
    options.setdefault("scale", head_dim**-0.5)
    return AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim, **options)


def latent_attention(keys: ConfigKeys, rope: RopeConfig) -> AttentionConfig:
    nope = keys.integer("qk_nope_head_dim")
    scale = float(nope + rope.dims) ** -0.5
    mscale_all_dim = rope.params.get("mscale_all_dim")
    if mscale_all_dim:
        scale *= yarn_scale(float(rope.params["factor"]), mscale_all_dim) ** 2
    return AttentionConfig(
        num_heads=keys.integer("num_attention_heads"),
        num_kv_heads=1,
        head_dim=nope + rope.dims,
        v_head_dim=keys.integer("v_head_dim"),
        scale=scale,
        q_lora_rank=keys.integer("q_lora_rank", default=0, minimum=0),
        kv_lora_rank=keys.integer("kv_lora_rank"),
        qk_nope_dim=nope,
    )


def routed_experts(keys: ConfigKeys, width: str, **options: Any) -> MoeConfig:
    return MoeConfig(
        num_experts=keys.integer("num_experts", "num_local_experts", "n_routed_experts", maximum=MOST_EXPERTS),
        num_experts_per_tok=keys.integer("num_experts_per_tok"),
        expert_dim=keys.integer(width),
        **options,
    )


def window_everywhere(keys: ConfigKeys) -> tuple[int, ...]:
    window = keys.integer("sliding_window", default=0, minimum=0)
    return (window,) * keys.num_layers()


def windows_by_type(keys: ConfigKeys, default: Callable[[int], bool]) -> tuple[int, ...]:
    """Windows of layers whose entry in ``layer_types`` slides; without that key, of those that ``default(layer)`` names."""
    count = keys.num_layers()
    types = keys.items("layer_types")
    if types is None:
        types = ["sliding_attention" if default(layer) else "full_attention" for layer in range(count)]
    unknown = [kind for kind in types if kind not in ("sliding_attention", "full_attention")]
    if unknown or len(types) != count:
        what = f"has {unknown[0]!r}" if unknown else f"has {len(types)} entries for {count} layers"
        raise keys.error(f"layer_types {what}")
    if "sliding_attention" not in types:
        return (0,) * count
    window = keys.integer("sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def sparse_layers(keys: ConfigKeys) -> tuple[bool, ...]:
    """Qwen's rule: every ``decoder_sparse_step``-th layer has experts, unless named in ``mlp_only_layers``."""
    step = keys.integer("decoder_sparse_step", default=1)
    dense = keys.items("mlp_only_layers") or ()
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(keys.num_layers()))


def leading_dense(keys: ConfigKeys, default: int) -> tuple[bool, ...]:
    keys.require("moe_layer_freq", 1)
    dense = keys.integer("first_k_dense_replace", default=default, minimum=0)
    return tuple(layer >= dense for layer in range(keys.num_layers()))
