"""Weight names and conventions of GGUF files: tiny checkpoints of every architecture, rewritten as llama.cpp's converters
would, give transformers' logits."""

import numpy as np
import pytest
import torch

import checkpoints
from gguf_files import write_gguf
from in_memory import tiny_model
from test_parity import error, prefill_and_decode, token_ids
from tidegate.backends.reference import ReferenceBackend
from tidegate.checkpoint.gguf import GgufCheckpoint
from tidegate.checkpoint.hf import HfCheckpoint
from tidegate.errors import BadTensor
from tidegate.models.families import model_config, weight_map
from tidegate.models.rope import rope_table

RENAMES = (
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers", "blk"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.sinks", "attn_sinks.weight"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("input_layernorm", "attn_norm"),
    ("block_sparse_moe.router.layer", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.gate.", "ffn_gate_inp."),
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)
ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "deepseek_v2": "deepseek2",
    "deepseek_v2_lite": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "granitemoe": "granitemoe",
    "llama": "llama",
    "qwen3": "qwen3",
}


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """q or k rows reordered from (i, i + d/2) pairs to (2i, 2i+1), as the llama and granite converters do."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def renamed(name: str, arch: str) -> str:
    for old, new in RENAMES:
        name = name.replace(old, new)
    after = "post_attention_norm" if arch in ("gpt-oss", "glm4moe") else "ffn_norm"
    return name.replace("post_attention_layernorm", after)


def split_experts(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Fused experts of Granite and gpt-oss as GGUF's gate, up and down."""
    prefix = renamed(name[: name.index("block_sparse_moe" if "block_sparse" in name else "mlp.")], "")
    if name.endswith("input_linear.weight"):
        gate, up = np.split(values, 2, axis=1)
        return {f"{prefix}ffn_gate_exps.weight": gate, f"{prefix}ffn_up_exps.weight": up}
    if name.endswith("output_linear.weight"):
        return {f"{prefix}ffn_down_exps.weight": values}
    kind = "bias" if name.endswith("_bias") else "weight"
    if kind == "weight":
        values = values.swapaxes(1, 2)
    if "gate_up" in name:
        return {f"{prefix}ffn_gate_exps.{kind}": values[:, 0::2], f"{prefix}ffn_up_exps.{kind}": values[:, 1::2]}
    return {f"{prefix}ffn_down_exps.{kind}": values}


def gguf_tensors(checkpoint: HfCheckpoint, arch: str, *, split_kv_b: bool) -> dict[str, np.ndarray]:
    config, att = checkpoint.config, model_config(checkpoint.config).attention
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, info in checkpoint.tensors.items():
        values = checkpoint.read_f32(name).reshape(info.shape)
        parts = name.split(".")
        if "experts" in parts and parts[parts.index("experts") + 1].isdigit():
            kind = {"w1": "gate", "w3": "up", "w2": "down"}.get(parts[-2], parts[-2].removesuffix("_proj"))
            number = int(parts[parts.index("experts") + 1])
            stacks.setdefault(f"blk.{parts[2]}.ffn_{kind}_exps.weight", {})[number] = values
        elif ".experts." in name or "_linear." in name:
            out.update(split_experts(name, values))
        elif split_kv_b and name.endswith("kv_b_proj.weight"):
            heads = values.reshape(att.num_heads, -1, att.kv_lora_rank)
            prefix = f"blk.{parts[2]}.attn_"
            out[prefix + "k_b.weight"] = heads[:, : att.qk_nope_dim].swapaxes(1, 2)
            out[prefix + "v_b.weight"] = heads[:, att.qk_nope_dim :]
        else:
            if arch in ("llama", "granitemoe") and parts[-2] in ("q_proj", "k_proj"):
                values = neighbours(
                    values, config["num_attention_heads" if parts[-2] == "q_proj" else "num_key_value_heads"]
                )
            new = renamed(name, arch)
            out[new] = values.reshape(-1) if new.endswith("gate_inp_shexp.weight") else values
    out.update({name: np.stack([stack[e] for e in range(len(stack))]) for name, stack in stacks.items()})
    if config["model_type"] == "llama":  # llama3's scaling travels as factors
        rope = model_config(config).rope
        plain = 1 / rope.theta ** (np.arange(0, rope.dims, 2) / rope.dims)
        out["rope_freqs.weight"] = (plain / rope_table(rope, 64).inv_freq).astype(np.float32)
    return {name: np.ascontiguousarray(values) for name, values in out.items()}


def gguf_metadata(config: dict, arch: str, *, split_kv_b: bool) -> dict[str, object]:
    """What the converters write, from the Hugging Face config."""
    get = config.get
    keys: dict[str, object] = {
        "block_count": get("num_hidden_layers"),
        "context_length": get("max_position_embeddings"),
        "embedding_length": get("hidden_size"),
        "feed_forward_length": get("intermediate_size"),
        "attention.head_count": get("num_attention_heads"),
        "attention.head_count_kv": get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": get("rms_norm_eps"),
        "rope.freq_base": get("rope_parameters")["rope_theta"],
        "expert_count": get("num_experts") or get("num_local_experts") or get("n_routed_experts"),
        "expert_used_count": get("num_experts_per_tok"),
        "expert_feed_forward_length": get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": get("shared_expert_intermediate_size"),
        "expert_shared_count": get("n_shared_experts"),
        "leading_dense_block_count": get("first_k_dense_replace"),
        "expert_weights_scale": get("routed_scaling_factor"),
        "attention.sliding_window": get("sliding_window") or None,
        "attention.clamp_kqv": get("clip_qkv"),
        "attention.scale": get("attention_multiplier"),
        "embedding_scale": get("embedding_multiplier"),
        "residual_scale": get("residual_multiplier"),
        "logit_scale": get("logits_scaling"),
    }
    if config["model_type"] in ("deepseek_v3", "glm4_moe"):
        keys |= {"expert_gating_func": 2, "expert_weights_norm": get("norm_topk_prob")}
    if get("topk_method") == "group_limited_greedy" or config["model_type"] in ("deepseek_v3", "glm4_moe"):
        keys |= {"expert_group_count": get("n_group"), "expert_group_used_count": get("topk_group")}
    if arch == "deepseek2":
        rope, nope, value = get("qk_rope_head_dim"), get("qk_nope_head_dim"), get("v_head_dim")
        keys |= {"attention.kv_lora_rank": get("kv_lora_rank"), "attention.q_lora_rank": get("q_lora_rank")}
        keys |= {"rope.dimension_count": rope, "attention.key_length": nope + rope, "attention.value_length": value}
        if split_kv_b:
            latent = get("kv_lora_rank")
            keys |= {
                "attention.key_length": latent + rope,
                "attention.value_length": latent,
                "attention.head_count_kv": 1,
            }
            keys |= {"attention.key_length_mla": nope + rope, "attention.value_length_mla": value}
    else:
        head_dim = get("head_dim") or get("hidden_size") // get("num_attention_heads")
        partial = get("rope_parameters").get("partial_rotary_factor", 1.0)
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        keys["rope.dimension_count"] = int(head_dim * partial)
    rope_parameters = get("rope_parameters")
    if rope_parameters["rope_type"] == "yarn":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope_parameters["factor"]}
        keys["rope.scaling.original_context_length"] = rope_parameters["original_max_position_embeddings"]
        if "mscale_all_dim" in rope_parameters:
            keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope_parameters["mscale_all_dim"]
    return {f"{arch}.{key}": value for key, value in keys.items() if value is not None}


@pytest.fixture
def rewritten(tmp_path):
    """A function: variant -> (GgufCheckpoint, transformers model)."""

    def make(name: str) -> tuple[GgufCheckpoint, object]:
        overrides = {"gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}, "qwen3": {"use_sliding_window": False}}
        model = checkpoints.build(name, **overrides.get(name, {}))
        model.save_pretrained(tmp_path / "hf")
        arch, split = ARCHITECTURES[name], name in ("deepseek_v3", "deepseek_v2_lite")
        checkpoint = HfCheckpoint(tmp_path / "hf")
        metadata = gguf_metadata(checkpoint.config, arch, split_kv_b=split)
        tensors = gguf_tensors(checkpoint, arch, split_kv_b=split)
        return GgufCheckpoint(write_gguf(tmp_path / "model.gguf", arch, metadata, tensors)), model

    return make


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gguf_gives_the_logits_of_the_source(name, rewritten):
    checkpoint, model = rewritten(name)
    ids = token_ids()
    with torch.no_grad():
        wanted = model(torch.tensor(ids)[None].long()).logits[0].numpy()
    assert error(prefill_and_decode(tiny_model(checkpoint, ReferenceBackend), ids), wanted) < 2e-4


def test_a_tensor_of_the_wrong_shape_is_named(rewritten, tmp_path):
    checkpoint, _ = rewritten("qwen3_moe")
    config = model_config(checkpoint.config)
    tensors = {name: checkpoint.read_f32(name).reshape(info.shape) for name, info in checkpoint.tensors.items()}
    metadata = {key: value for key, value in checkpoint.metadata.items() if not key.startswith(("GGUF.", "general."))}
    tensors["blk.1.ffn_down_exps.weight"] = tensors["blk.1.ffn_down_exps.weight"][:, :-1].copy()
    broken = GgufCheckpoint(write_gguf(tmp_path / "broken.gguf", "qwen3moe", metadata, tensors))
    with pytest.raises(
        BadTensor, match=r"broken\.gguf: blk\.1\.ffn_down_exps\.weight: wanted .*16, 48, 40.* got .*16, 47, 40"
    ):
        weight_map(broken, config)
    del tensors["blk.1.ffn_down_exps.weight"]
    broken = GgufCheckpoint(write_gguf(tmp_path / "missing.gguf", "qwen3moe", metadata, tensors))
    with pytest.raises(BadTensor, match=r"missing\.gguf: tensor blk\.1\.ffn_down_exps\.weight is missing"):
        weight_map(broken, config)
