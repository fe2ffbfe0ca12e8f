"""Seeded expert stores written straight from a ModelConfig: no transformers, no conversion, a fraction of a second.

Variances are kept near one through the layers, so that routing varies and logits differ. With ``parity`` the router of
every layer sends even token ids to the lower half of the experts and odd ones to the upper half.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tidegate.checkpoint.manifest import DENSE_FILE, EXPERTS_FILE, MANIFEST, Manifest, SideFile, lay_out, to_json
from tidegate.model_config import ModelConfig
from tidegate.models.families import model_config
from tidegate.quant.formats import Format
from tidegate.quant.pack import pack

VOCAB = 258  # all bytes, end of text, end of turn
END, TURN = 256, 257
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<|turn|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def qwen_config(**changes: Any) -> ModelConfig:
    """Qwen3-MoE in miniature: grouped attention with q/k norms, softmax routing."""
    keys = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": VOCAB, "hidden_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 16,
        "num_experts_per_tok": 4, "moe_intermediate_size": 32, "intermediate_size": 128, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 2048, "tie_word_embeddings": False, "eos_token_id": END,
    }  # fmt: skip
    return model_config({**keys, **changes})


def deepseek_config(**changes: Any) -> ModelConfig:
    """DeepSeek-V2 in miniature: latent attention, a leading dense layer, group-limited routing, shared experts."""
    keys = {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": VOCAB, "hidden_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 12, "num_experts_per_tok": 3,
        "n_shared_experts": 1, "moe_intermediate_size": 32, "intermediate_size": 96, "first_k_dense_replace": 1,
        "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5,
        "norm_topk_prob": False, "scoring_func": "softmax", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": False, "eos_token_id": END,
        "moe_layer_freq": 1,
    }  # fmt: skip
    return model_config({**keys, **changes})


def write_store(
    folder: Path,
    config: ModelConfig,
    experts: str = "int4-g32",
    dense: str = "int8-g32",
    *,
    seed: int = 0,
    parity: bool = False,
) -> Path:
    """Returns ``folder``."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    dense_format, expert_format = Format.parse(dense), Format.parse(experts)
    formats = dict.fromkeys(_matrices(config), dense_format)
    entries, layers = lay_out(config, formats, [(expert_format, expert_format)] * config.num_moe_layers)
    with (folder / DENSE_FILE).open("wb") as file:
        done = []
        for entry in entries:
            data = _dense(rng, entry, config, parity)
            file.write(bytes(entry.offset - file.tell()) + data)
            done.append(replace(entry, crc32=zlib.crc32(data)))
        file.write(bytes(-file.tell() % 4096))
    with (folder / EXPERTS_FILE).open("wb") as file:
        done_layers = []
        for layer in layers:
            blobs = [_blob(rng, layer.layout) for _ in range(layer.num_experts)]
            file.writelines(blobs)
            done_layers.append(replace(layer, crc32s=tuple(zlib.crc32(blob) for blob in blobs)))
    side = {"tokenizer.json": byte_tokenizer().to_str(), "chat_template.jinja": CHAT_TEMPLATE}
    files = {}
    for name, text in side.items():
        (folder / name).write_text(text)
        files[name] = SideFile(len(text.encode()), zlib.crc32(text.encode()))
    special = {"bos_token": None, "eos_token": "<|end|>", "eos_token_ids": [END, TURN], "add_bos": False}
    manifest = Manifest(config, tuple(done), tuple(done_layers), files, special, {"seed": seed}, {})
    (folder / MANIFEST).write_text(to_json(manifest))
    return folder


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and two special ones."""
    tokenizer = Tokenizer(
        models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|turn|>"])
    return tokenizer


def _matrices(config: ModelConfig) -> list[str]:
    from tidegate.checkpoint.inventory import dense_tensors  # noqa: PLC0415

    return [tensor.name for tensor in dense_tensors(config) if tensor.is_matrix]


def _dense(rng: np.random.Generator, entry: Any, config: ModelConfig, parity: bool) -> bytes:
    name = entry.name.rpartition(".")[2]
    values = rng.standard_normal(entry.shape, dtype=np.float32)
    if len(entry.shape) == 1:
        values = values * np.float32(0.1) + (1 if name.endswith("norm") else 0)
    else:
        values /= np.float32(entry.shape[-1] ** 0.5)
    if name == "embed":
        values *= np.float32(entry.shape[-1] ** 0.5)
        if parity:
            values[:, 0] = np.where(np.arange(len(values)) % 2, -40, 40)
    elif name == "router":
        values *= 2
        if parity:
            values[:, 0] = np.where(np.arange(len(values)) < len(values) // 2, 5, -5)
    elif parity and name in ("o", "down", "shared_down"):
        values[0] = 0  # nothing else writes the dimension that decides
    return (pack(values, entry.fmt) if entry.fmt else values.astype(np.float32)).tobytes()


def _blob(rng: np.random.Generator, layout: Any) -> bytes:
    hidden, width = layout.hidden_size, layout.expert_dim
    blob = np.zeros(layout.blob_bytes, np.uint8)
    parts = ((0, width, hidden, layout.fmt), (layout.up_offset, width, hidden, layout.fmt),
             (layout.down_offset, hidden, width, layout.down_fmt))  # fmt: skip
    for offset, n, k, fmt in parts:
        w = rng.standard_normal((n, k), dtype=np.float32) / np.float32(k**0.5)
        if offset == layout.down_offset:
            w[0] = 0
        packed = pack(w, fmt)
        blob[offset : offset + packed.size] = packed
    return blob.tobytes()
