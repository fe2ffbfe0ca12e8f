"""A store of a model with tiny matrices, written from nothing: what it costs to run is not proportional to bytes."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from tidegate.checkpoint.inventory import dense_tensors
from tidegate.checkpoint.manifest import ALIGNMENT, DENSE_FILE, EXPERTS_FILE, MANIFEST, Manifest, lay_out, to_json
from tidegate.models.families import model_config
from tidegate.quant.formats import Format

_CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 32, "moe_intermediate_size": 32,
    "max_position_embeddings": 512, "norm_topk_prob": True,
}  # fmt: skip


def write_tiny_store(folder: Path, num_layers: int, experts_per_token: int) -> Path:
    """Random weights of a Qwen3-MoE in miniature; returns ``folder``, which must not exist."""
    folder.mkdir(parents=True)
    shape = {"num_hidden_layers": num_layers, "num_experts_per_tok": experts_per_token}
    config, rng = model_config(_CONFIG | shape), np.random.default_rng(0)
    int8, int4 = Format("int8", 32), Format("int4", 32)
    formats = {tensor.name: int8 for tensor in dense_tensors(config) if tensor.is_matrix}
    entries, layers = lay_out(config, formats, [(int4, int4)] * config.num_moe_layers)
    last = entries[-1].offset + entries[-1].nbytes
    section = np.zeros(-(-last // ALIGNMENT) * ALIGNMENT, np.uint8)
    done = []
    for entry in entries:
        view = section[entry.offset : entry.offset + entry.nbytes]
        if entry.fmt:
            view[:] = 0x2B  # scales of 0.06, codes near the offset
        else:
            values = (
                rng.standard_normal(entry.shape, np.float32) if len(entry.shape) > 1 else np.ones(entry.shape, "f4")
            )
            view[:] = values.reshape(-1).view(np.uint8)
        done.append(replace(entry, crc32=zlib.crc32(view.data)))
    section.tofile(folder / DENSE_FILE)
    blob = np.full(layers[0].layout.blob_bytes, 0x2B, np.uint8)
    blobs = np.tile(blob, sum(layer.num_experts for layer in layers))
    blobs.tofile(folder / EXPERTS_FILE)
    crc = zlib.crc32(blob.data)
    checked = tuple(replace(layer, crc32s=(crc,) * layer.num_experts) for layer in layers)
    special: dict[str, object] = {"bos_token": None, "eos_token": None, "eos_token_ids": [], "add_bos": False}
    manifest = Manifest(config, tuple(done), checked, {}, special, {"name": "probe"}, {})
    (folder / MANIFEST).write_text(to_json(manifest))
    return folder
