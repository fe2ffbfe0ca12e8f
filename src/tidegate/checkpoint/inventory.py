"""Every dense tensor a model of a given config has, under Tidegate's own names: the one list that the converter
writes, the decoder reads and the planner counts.

D hidden, V vocabulary, H heads, E experts, I feed-forward width.

| name | shape | |
|---|---|---|
| ``embed`` | [V, D] matrix | also the head when ``tied_embeddings`` |
| ``head``, ``head_bias`` | [V, D] matrix, [V] | |
| ``final_norm`` (``_bias``) | [D] | |
| ``layers.L.attn_norm`` (``_bias``), ``layers.L.mlp_norm`` (``_bias``) | [D] | |
| ``layers.L.qkv`` (``_bias``) | [H*head_dim + KV*head_dim + KV*v_head_dim, D] matrix | GQA |
| ``layers.L.o`` (``_bias``) | [D, H*v_head_dim] matrix | |
| ``layers.L.q_norm``, ``layers.L.k_norm`` | [head_dim], or the whole projection's width | ``qk_norm`` |
| ``layers.L.sinks`` | [H] | |
| ``layers.L.q`` | [H*(nope+rope), D] matrix | MLA without q_lora |
| ``layers.L.q_a``, ``q_a_norm``, ``q_b`` | [q_lora, D], [q_lora], [H*(nope+rope), q_lora] | MLA with q_lora |
| ``layers.L.kv_a``, ``kv_norm`` | [kv_lora + rope, D] matrix, [kv_lora] | MLA |
| ``layers.L.k_up``, ``v_up`` | [H*kv_lora, nope], [H*v_head_dim, kv_lora] matrices | MLA, kv_b split and absorbed |
| ``layers.L.router`` (``_bias``, ``_correction``) | [E, D] float32, [E] | never quantized |
| ``layers.L.shared_gate_up``, ``shared_down``, ``shared_gate`` | [2I, D], [D, I], [1, D] | shared experts together |
| ``layers.L.gate_up``, ``down`` | [2I, D], [D, I] | layers without experts |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tidegate.model_config import ModelConfig

AddMatrix = Callable[[str, int, int], None]
AddPlain = Callable[..., None]


@dataclass(frozen=True)
class DenseTensor:
    """``is_matrix``: packed in the dense format; otherwise plain float32 in row-major order."""

    name: str
    shape: tuple[int, ...]
    is_matrix: bool


def dense_tensors(config: ModelConfig) -> list[DenseTensor]:
    """All dense tensors in file order."""
    out: list[DenseTensor] = []

    def matrix(name: str, n: int, k: int) -> None:
        out.append(DenseTensor(name, (n, k), True))

    def plain(name: str, *shape: int) -> None:
        out.append(DenseTensor(name, shape, False))

    def norm(name: str, n: int) -> None:
        plain(name, n)
        if config.norm == "layer":
            plain(f"{name}_bias", n)

    matrix("embed", config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        norm(prefix + "attn_norm", config.hidden_size)
        (_latent_attention if config.attention.is_mla else _grouped_attention)(config, prefix, matrix, plain)
        norm(prefix + "mlp_norm", config.hidden_size)
        _feed_forward(config, layer, prefix, matrix, plain)
    norm("final_norm", config.hidden_size)
    if not config.tied_embeddings:
        matrix("head", config.vocab_size, config.hidden_size)
    if config.has_head_bias:
        plain("head_bias", config.vocab_size)
    return out


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """All weights, and those that one token uses (its chosen experts and everything dense)."""
    dense = sum(prod(tensor.shape) for tensor in dense_tensors(config))
    moe = config.moe
    if moe is None:
        return dense, dense
    each = 3 * moe.expert_dim * config.hidden_size
    if moe.has_expert_bias:
        each += 2 * moe.expert_dim + config.hidden_size
    layers = config.num_moe_layers
    return dense + layers * moe.num_experts * each, dense + layers * moe.num_experts_per_tok * each


def _grouped_attention(config: ModelConfig, prefix: str, matrix: AddMatrix, plain: AddPlain) -> None:
    att = config.attention
    q, k, v = att.num_heads * att.head_dim, att.num_kv_heads * att.head_dim, att.num_kv_heads * att.v_head_dim
    matrix(prefix + "qkv", q + k + v, config.hidden_size)
    if config.has_attention_bias:
        plain(prefix + "qkv_bias", q + k + v)
    if att.qk_norm != "none":
        plain(prefix + "q_norm", att.head_dim if att.qk_norm == "head" else q)
        plain(prefix + "k_norm", att.head_dim if att.qk_norm == "head" else k)
    if att.has_sinks:
        plain(prefix + "sinks", att.num_heads)
    matrix(prefix + "o", config.hidden_size, att.num_heads * att.v_head_dim)
    if config.has_output_bias:
        plain(prefix + "o_bias", config.hidden_size)


def _latent_attention(config: ModelConfig, prefix: str, matrix: AddMatrix, plain: AddPlain) -> None:
    att, rope_dim = config.attention, config.rope.dims
    q = att.num_heads * (att.qk_nope_dim + rope_dim)
    if att.q_lora_rank:
        matrix(prefix + "q_a", att.q_lora_rank, config.hidden_size)
        if config.has_attention_bias:
            plain(prefix + "q_a_bias", att.q_lora_rank)
        plain(prefix + "q_a_norm", att.q_lora_rank)
        matrix(prefix + "q_b", q, att.q_lora_rank)
    else:
        matrix(prefix + "q", q, config.hidden_size)
    matrix(prefix + "kv_a", att.kv_lora_rank + rope_dim, config.hidden_size)
    if config.has_attention_bias:
        plain(prefix + "kv_a_bias", att.kv_lora_rank + rope_dim)
    plain(prefix + "kv_norm", att.kv_lora_rank)
    matrix(prefix + "k_up", att.num_heads * att.kv_lora_rank, att.qk_nope_dim)
    matrix(prefix + "v_up", att.num_heads * att.v_head_dim, att.kv_lora_rank)
    matrix(prefix + "o", config.hidden_size, att.num_heads * att.v_head_dim)
    if config.has_output_bias:
        plain(prefix + "o_bias", config.hidden_size)


def _feed_forward(config: ModelConfig, layer: int, prefix: str, matrix: AddMatrix, plain: AddPlain) -> None:
    moe = config.moe
    if moe is None or not config.moe_layers[layer]:
        matrix(prefix + "gate_up", 2 * config.dense_dim, config.hidden_size)
        matrix(prefix + "down", config.hidden_size, config.dense_dim)
        return
    plain(prefix + "router", moe.num_experts, config.hidden_size)
    if moe.has_router_bias:
        plain(prefix + "router_bias", moe.num_experts)
    if moe.has_correction_bias:
        plain(prefix + "router_correction", moe.num_experts)
    if moe.shared_dim:
        matrix(prefix + "shared_gate_up", 2 * moe.shared_dim, config.hidden_size)
        matrix(prefix + "shared_down", config.hidden_size, moe.shared_dim)
        if moe.has_shared_gate:
            matrix(prefix + "shared_gate", 1, config.hidden_size)
