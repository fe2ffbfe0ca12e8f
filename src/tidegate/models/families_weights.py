"""Weight names of Hugging Face checkpoints: where each dense tensor of checkpoint/inventory.py and each expert is.

D hidden, V vocabulary, H heads, E experts, F expert width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tidegate.checkpoint.base import Checkpoint
from tidegate.checkpoint.inventory import dense_tensors
from tidegate.checkpoint.sources import ExpertSources, Part, Source
from tidegate.errors import BadTensor
from tidegate.model_config import ModelConfig

Wanted = tuple[str, tuple[int, ...]]  # name and shape of a whole tensor of the checkpoint

_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "MXFP4")
_BLOCK_SPARSE = ("mixtral", "phimoe")
# Buffers that old checkpoints carry along and nobody reads.
_IGNORED = re.compile(r"\.(rotary_emb\.inv_freq|attn\.(masked_)?bias|[kv]_scale)$")
_SIMPLE = {
    "attn_norm": "input_layernorm.weight",
    "attn_norm_bias": "input_layernorm.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_norm_bias": "post_attention_layernorm.bias",
    "o": "self_attn.o_proj.weight",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "sinks": "self_attn.sinks",
    "q": "self_attn.q_proj.weight",
    "q_a": "self_attn.q_a_proj.weight",
    "q_a_bias": "self_attn.q_a_proj.bias",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "q_b": "self_attn.q_b_proj.weight",
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_bias": "self_attn.kv_a_proj_with_mqa.bias",
    "kv_norm": "self_attn.kv_a_layernorm.weight",
    "router_correction": "mlp.gate.e_score_correction_bias",
    "router_bias": "mlp.router.bias",
    "shared_gate": "mlp.shared_expert_gate.weight",
}
_TOP = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "final_norm_bias": "model.norm.bias",
    "head": "lm_head.weight",
    "head_bias": "lm_head.bias",
}


class HfWeights:
    """The WeightMap (checkpoint/sources.py) of a Hugging Face folder."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self._checkpoint, self._config = checkpoint, config
        self._shapes = {tensor.name: tensor.shape for tensor in dense_tensors(config)}
        self._decoder_layers = [layer for layer, is_moe in enumerate(config.moe_layers) if is_moe]

    def dense(self, name: str) -> Source:
        suffix = name.rpartition(".")[2]
        if suffix in ("k_up", "v_up"):
            return self._kv_b_rows(name, suffix)
        return Source.of(*(tensor for tensor, _ in self._dense(name)))

    def expert(self, layer: int, expert: int) -> ExpertSources:
        prefix = f"model.layers.{self._decoder_layers[layer]}."
        family = self._config.family
        if family == "gpt_oss":
            return self._gpt_oss_expert(prefix + "mlp.experts.", expert)
        if family == "granitemoe":
            return self._stacked(prefix + "block_sparse_moe.", "input_linear.weight", "output_linear.weight", expert)
        if self._is_stacked(prefix):
            return self._stacked(prefix + "mlp.experts.", "gate_up_proj", "down_proj", expert)
        names = self._expert_names(prefix, expert)
        return ExpertSources(*(Source.of(name) for name in names))

    def wanted(self) -> Iterator[Wanted]:
        """Every tensor the model needs, with its shape. ``k_up`` and ``v_up`` name the same one."""
        for name in self._shapes:
            yield from self._dense(name)
        moe = self._config.moe
        if moe is None:
            return
        for layer in self._decoder_layers:
            yield from self._experts(f"model.layers.{layer}.")

    def _dense(self, name: str) -> list[Wanted]:
        """The checkpoint tensors that, stacked by rows, make the dense tensor ``name``."""
        shape = self._shapes[name]
        if name in _TOP:
            return [(_TOP[name], shape)]
        _, layer, suffix = name.split(".")
        prefix = f"model.layers.{layer}."
        att = self._config.attention
        if suffix in _SIMPLE:
            return [(prefix + _SIMPLE[suffix], shape)]
        if suffix in ("qkv", "qkv_bias"):
            kind = "weight" if suffix == "qkv" else "bias"
            rows = (att.num_heads * att.head_dim, att.num_kv_heads * att.head_dim, att.num_kv_heads * att.v_head_dim)
            return [(f"{prefix}self_attn.{p}_proj.{kind}", (n, *shape[1:])) for p, n in zip("qkv", rows, strict=True)]
        if suffix in ("k_up", "v_up"):
            rows_per_head = att.qk_nope_dim + att.v_head_dim
            return [(prefix + "self_attn.kv_b_proj.weight", (att.num_heads * rows_per_head, att.kv_lora_rank))]
        return self._feed_forward(prefix, suffix, shape)

    def _feed_forward(self, prefix: str, suffix: str, shape: tuple[int, ...]) -> list[Wanted]:
        if suffix == "router":
            return [(prefix + self._router_name(), shape)]
        base = prefix + "mlp."
        if suffix.startswith("shared_"):
            assert self._config.moe is not None
            base += "shared_expert." if self._config.moe.has_shared_gate else "shared_experts."
        if suffix.endswith("gate_up"):
            half = (shape[0] // 2, shape[1])
            return [(base + "gate_proj.weight", half), (base + "up_proj.weight", half)]
        return [(base + "down_proj.weight", shape)]

    def _router_name(self) -> str:
        if self._config.family in _BLOCK_SPARSE:
            return "block_sparse_moe.gate.weight"
        names = {"granitemoe": "block_sparse_moe.router.layer.weight", "gpt_oss": "mlp.router.weight"}
        return names.get(self._config.family, "mlp.gate.weight")

    def _kv_b_rows(self, name: str, suffix: str) -> Source:
        """Heads of kv_b are [nope | v] rows; k_up takes the nope rows transposed, v_up the v rows as they are."""
        [(tensor, _)] = self._dense(name)
        att = self._config.attention
        step = att.qk_nope_dim + att.v_head_dim
        starts = [head * step for head in range(att.num_heads)]
        if suffix == "k_up":
            return Source.of(*(Part(tensor, rows=(s, s + att.qk_nope_dim, 1), transpose=True) for s in starts))
        return Source.of(*(Part(tensor, rows=(s + att.qk_nope_dim, s + step, 1)) for s in starts))

    def _is_stacked(self, prefix: str) -> bool:
        return prefix + "mlp.experts.gate_up_proj" in self._checkpoint.tensors

    def _expert_names(self, prefix: str, expert: int) -> list[str]:
        """Gate, up, down of the layout with one tensor an expert."""
        if self._config.family in _BLOCK_SPARSE:
            return [f"{prefix}block_sparse_moe.experts.{expert}.{w}.weight" for w in ("w1", "w3", "w2")]
        return [f"{prefix}mlp.experts.{expert}.{w}_proj.weight" for w in ("gate", "up", "down")]

    def _stacked(self, prefix: str, gate_up: str, down: str, expert: int) -> ExpertSources:
        """Experts stacked in [E, 2F, D] (gate above up) and [E, D, F]."""
        assert self._config.moe is not None
        f = self._config.moe.expert_dim
        return ExpertSources(
            gate=Source.of(Part(prefix + gate_up, index=expert, rows=(0, f, 1))),
            up=Source.of(Part(prefix + gate_up, index=expert, rows=(f, 2 * f, 1))),
            down=Source.of(Part(prefix + down, index=expert)),
        )

    def _gpt_oss_expert(self, prefix: str, e: int) -> ExpertSources:
        """Gate and up interleaved; transposed ([E, D, 2F]) in bf16, by rows ([E, 2F, D]) in MXFP4."""
        even, odd = (0, None, 2), (1, None, 2)
        gate_up, down, bias = prefix + "gate_up_proj", prefix + "down_proj", prefix + "gate_up_proj_bias"
        if self._is_mxfp4(gate_up):
            gate, up = Part(gate_up, index=e, rows=even), Part(gate_up, index=e, rows=odd)
        else:
            gate = Part(gate_up, index=e, cols=even, transpose=True)
            up = Part(gate_up, index=e, cols=odd, transpose=True)
        return ExpertSources(
            gate=Source.of(gate),
            up=Source.of(up),
            down=Source.of(Part(down, index=e, transpose=not self._is_mxfp4(down))),
            gate_bias=Source.of(Part(bias, index=e, rows=even)),
            up_bias=Source.of(Part(bias, index=e, rows=odd)),
            down_bias=Source.of(Part(prefix + "down_proj_bias", index=e)),
        )

    def _is_mxfp4(self, tensor: str) -> bool:
        info = self._checkpoint.tensors.get(tensor)
        return info is not None and info.dtype == "MXFP4"

    def _experts(self, prefix: str) -> Iterator[Wanted]:
        """The tensors that hold the experts of one decoder layer."""
        moe, d = self._config.moe, self._config.hidden_size
        assert moe is not None
        e, f = moe.num_experts, moe.expert_dim
        if self._config.family == "gpt_oss":
            base = prefix + "mlp.experts."
            for name, rows, cols in (("gate_up_proj", 2 * f, d), ("down_proj", d, f)):
                yield base + name, (e, rows, cols) if self._is_mxfp4(base + name) else (e, cols, rows)
                yield f"{base}{name}_bias", (e, rows)
        elif self._config.family == "granitemoe":
            yield prefix + "block_sparse_moe.input_linear.weight", (e, 2 * f, d)
            yield prefix + "block_sparse_moe.output_linear.weight", (e, d, f)
        elif self._is_stacked(prefix):
            yield prefix + "mlp.experts.gate_up_proj", (e, 2 * f, d)
            yield prefix + "mlp.experts.down_proj", (e, d, f)
        else:
            for expert in range(e):
                gate, up, down = self._expert_names(prefix, expert)
                yield from ((gate, (f, d)), (up, (f, d)), (down, (d, f)))

    def is_ignored(self, tensor: str) -> bool:
        """A tensor that the model may carry without it changing the answer: a tied head, layers of multi-token prediction."""
        if self._config.tied_embeddings and tensor == _TOP["head"]:
            return True
        match = re.match(r"model\.layers\.(\d+)\.", tensor)
        return bool(match and int(match[1]) >= self._config.num_layers) or _IGNORED.search(tensor) is not None


def check_hf_weights(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Every tensor the model needs is there with its shape and a dtype we read, and none is left over that would change
    the answer. Raises BadTensor naming file, tensor, wanted and got."""
    weights = HfWeights(checkpoint, config)
    wanted = dict(weights.wanted())
    for name, shape in wanted.items():
        info = checkpoint.tensors.get(name)
        if info is None:
            raise BadTensor(f"{checkpoint.path}: tensor {name} is missing, wanted {list(shape)}")
        if info.shape != shape:
            raise BadTensor(f"{info.path}: {name}: wanted shape {list(shape)}, got {list(info.shape)}")
        if info.dtype not in _DTYPES:
            raise BadTensor(f"{info.path}: {name}: wanted dtype {', '.join(_DTYPES)}, got {info.dtype}")
    for name, info in checkpoint.tensors.items():
        if name not in wanted and not weights.is_ignored(name):
            raise BadTensor(
                f"{info.path}: {name} {list(info.shape)} is no part of a {config.family} model with this config"
            )
