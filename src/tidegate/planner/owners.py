"""Bytes by owner: of what a store holds (or a conversion would write), and of the source's headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.checkpoint.base import Checkpoint
from tidegate.checkpoint.inventory import dense_tensors
from tidegate.checkpoint.manifest import DenseEntry, ExpertLayer
from tidegate.model_config import ModelConfig
from tidegate.models.families_weights import FamilyWeights
from tidegate.quant.layout import ExpertLayout

EMBEDDINGS, ATTENTION, NORMS, ROUTERS = "embeddings", "attention", "norms", "routers"
SHARED, FEED_FORWARD, ROUTED, PADDING, UNUSED = "shared experts", "feed-forward", "routed experts", "padding", "unused"
_NORMS = ("attn_norm", "mlp_norm", "final_norm", "q_norm", "k_norm", "q_a_norm", "kv_norm")


def owner_of(name: str) -> str:
    """Who owns a tensor of ``inventory.dense_tensors``."""
    suffix = name.rpartition(".")[2].removesuffix("_bias")
    if suffix in ("embed", "head"):
        return EMBEDDINGS
    if suffix in _NORMS:
        return NORMS
    if suffix.startswith("router"):
        return ROUTERS
    if suffix.startswith("shared_"):
        return SHARED
    return FEED_FORWARD if suffix in ("gate_up", "down") else ATTENTION


def packed_by_owner(dense: Mapping[str, DenseEntry], dense_bytes: int, layers: Sequence[ExpertLayer]) -> dict[str, int]:
    """Of dense.bin and experts.bin; adds up to the sizes of the two files."""
    out = dict.fromkeys((EMBEDDINGS, ATTENTION, NORMS, ROUTERS, SHARED, FEED_FORWARD), 0)
    for entry in dense.values():
        out[owner_of(entry.name)] += entry.nbytes
    padding = dense_bytes - sum(out.values())
    out[ROUTED] = 0
    for layer in layers:
        inside = blob_parts(layer.layout)["padding"]
        out[ROUTED] += layer.num_experts * (layer.layout.blob_bytes - inside)
        padding += layer.num_experts * inside
    return {**out, PADDING: padding}


def blob_parts(layout: ExpertLayout) -> dict[str, int]:
    """One expert's blob: codes, scales (and minima), biases, padding; adds up to its size."""
    d, f = layout.hidden_size, layout.expert_dim
    codes = scales = 0
    for fmt, n, k, count in ((layout.fmt, f, d, 2), (layout.down_fmt, d, f, 1)):
        bits = {"f32": 32, "bf16": 16, "int8": 8}.get(fmt.kind, 4)
        codes += count * (n * k * bits // 8)
        scales += count * n * fmt.scale_bytes(k)
    biases = 4 * (2 * f + d) if layout.has_bias else 0
    return {
        "codes": codes, "scales": scales, "biases": biases, "padding": layout.blob_bytes - codes - scales - biases,
    }  # fmt: skip


def source_by_owner(checkpoint: Checkpoint, config: ModelConfig, weights: FamilyWeights) -> dict[str, int]:
    """Of the source's tensors; adds up to the sizes in its headers. ``weights`` has been checked."""
    tensors, wanted = checkpoint.tensors, weights.wanted
    owners = dict.fromkeys(tensors.keys() - wanted.keys() if len(tensors) > len(wanted) else (), UNUSED)
    for dense in dense_tensors(config):
        owners |= {name: owner_of(dense.name) for name, _ in weights.whole_tensors(dense.name)}
    out = dict.fromkeys((EMBEDDINGS, ATTENTION, NORMS, ROUTERS, SHARED, FEED_FORWARD, ROUTED, UNUSED), 0)
    for name, owner in owners.items():
        out[owner] += checkpoint.stored_bytes(name)
    out[ROUTED] = checkpoint.total_bytes - sum(out.values())
    return out
