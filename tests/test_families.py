"""Configs of every family: published ones in their old form, transformers' new form, and every way to get them wrong."""

import copy
import importlib
import json
import shutil

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

import checkpoints
from tidegate.checkpoint.hf import HfCheckpoint
from tidegate.checkpoint.inventory import dense_tensors
from tidegate.errors import BadTensor, CheckpointError, UnknownArchitecture
from tidegate.model_config import ModelConfig
from tidegate.models.families import model_config, weight_map
from tidegate.models.rope import rope_table

YARN_OLD = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
# The keys that matter of config.json as published on the hub, with rope in the form of their time.
PUBLISHED = {
    "Mixtral-8x7B": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32000,
    },
    "Qwen1.5-MoE-A2.7B": {
        "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192,
        "max_window_layers": 21, "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16,
        "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False, "vocab_size": 151936,
        "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "OLMoE-1B-7B": {
        "model_type": "olmoe", "clip_qkv": None, "hidden_size": 2048, "intermediate_size": 1024,
        "max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 50304,
    },
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 10000, "routed_scaling_factor": 1.0,
        "rope_scaling": {**YARN_OLD, "mscale": 0.707, "mscale_all_dim": 0.707}, "scoring_func": "softmax",
        "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 10000,
        "rope_scaling": {**YARN_OLD, "mscale": 1.0, "mscale_all_dim": 1.0}, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                         "rope_type": "yarn", "truncate": False},
        "vocab_size": 201088, "quantization_config": {"quant_method": "mxfp4"},
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "topk_group": 1,
        "use_qk_norm": False, "vocab_size": 151552,
    },
    "granite-3.0-1b-a400m": {
        "model_type": "granitemoe", "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_size": 1024,
        "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 4096, "num_attention_heads": 16,
        "num_experts_per_tok": 8, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "residual_multiplier": 0.22, "rope_theta": 10000, "tie_word_embeddings": True, "vocab_size": 49155,
    },
    "Phi-3.5-MoE": {
        "model_type": "phimoe", "attention_bias": True, "hidden_size": 4096, "intermediate_size": 6400, "lm_head_bias": True,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 16, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "longrope", "long_mscale": 1.243163121016122, "short_mscale": 1.243163121016122,
                         "original_max_position_embeddings": 4096,
                         "short_factor": np.linspace(1, 2.8, 64).tolist(), "long_factor": np.linspace(1, 64, 64).tolist()},
        "rope_theta": 10000.0, "router_jitter_noise": 0.01, "sliding_window": 131072, "vocab_size": 32064,
    },
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "vocab_size": 128256,
    },
}  # fmt: skip


def rotary(config: dict) -> tuple[np.ndarray, float]:
    """transformers' inverse frequencies and factor for a config."""
    family = config["model_type"]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    [kind] = [getattr(module, name) for name in dir(module) if name.endswith("RotaryEmbedding")]
    table = kind(transformers.AutoConfig.for_model(**copy.deepcopy(config)))
    return table.inv_freq.numpy(), table.attention_scaling


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_as_transformers_reads_them(name):
    config = PUBLISHED[name]
    ours = model_config(config)
    table = rope_table(ours.rope, 4096)
    inv_freq, factor = rotary(config)
    np.testing.assert_allclose(table.inv_freq, inv_freq, rtol=3e-7)
    if name != "Phi-3.5-MoE":  # its two mscales replace the factor
        assert table.factor == pytest.approx(factor, rel=1e-6)
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    assert ours.num_layers == theirs.num_hidden_layers and ours.norm_eps == theirs.rms_norm_eps
    assert ModelConfig.from_json(json.loads(json.dumps(ours.to_json()))) == ours


def test_parameter_counts_of_published_configs():
    """The inventory and the experts together have the size on the model card (billions)."""
    cards = {"Mixtral-8x7B": 46.7, "Qwen1.5-MoE-A2.7B": 14.3, "Qwen3-30B-A3B": 30.5, "OLMoE-1B-7B": 6.92,
             "DeepSeek-V2-Lite": 15.7, "DeepSeek-V3": 671, "gpt-oss-20b": 20.9, "GLM-4.5-Air": 106.9,
             "granite-3.0-1b-a400m": 1.33, "Phi-3.5-MoE": 41.9, "Llama-3.1-8B": 8.03}  # fmt: skip
    for name, billions in cards.items():
        config = model_config(PUBLISHED[name])
        count = sum(int(np.prod(tensor.shape)) for tensor in dense_tensors(config))
        if config.moe is not None:
            moe = config.moe
            per_expert = 3 * config.hidden_size * moe.expert_dim
            if moe.has_expert_bias:
                per_expert += 2 * moe.expert_dim + config.hidden_size
            count += config.num_moe_layers * moe.num_experts * per_expert
        assert count / 1e9 == pytest.approx(billions, rel=0.006), name


def test_longrope_picks_one_set_of_factors_by_the_context():
    config = PUBLISHED["Phi-3.5-MoE"]
    rope = model_config(config).rope
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"]
    for context in (4096, 4097):
        want, factor = init(theirs, seq_len=context)
        np.testing.assert_allclose(rope_table(rope, context).inv_freq, want.numpy(), rtol=3e-7)
    del rope.params["short_mscale"], rope.params["long_mscale"]
    assert rope_table(rope, 4096).factor == pytest.approx(factor)


@pytest.mark.parametrize("scaling", [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "truncate": False, "beta_fast": 8},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "attention_factor": 0.75},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "default", "partial_rotary_factor": 0.25},
])  # fmt: skip
def test_every_rope_scaling_agrees_with_transformers(scaling):
    base = {key: value for key, value in PUBLISHED["GLM-4.5-Air"].items() if not key.startswith(("rope", "partial"))}
    config = {**base, "rope_parameters": {"rope_theta": 12345.0, **scaling}}
    inv_freq, factor = rotary(config)
    table = rope_table(model_config(config).rope, 128)
    np.testing.assert_allclose(table.inv_freq, inv_freq, rtol=3e-7)
    assert table.factor == pytest.approx(factor) and table.dims == 2 * len(inv_freq)


@pytest.mark.parametrize(("name", "change", "message"), [
    ("Mixtral-8x7B", {"hidden_size": None}, "hidden_size is missing"),
    ("Mixtral-8x7B", {"num_local_experts": None}, "num_experts or num_local_experts or n_routed_experts is missing"),
    ("Mixtral-8x7B", {"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, got 0"),
    ("Mixtral-8x7B", {"num_hidden_layers": 1e30}, "num_hidden_layers must be a whole number of at most 4096"),
    ("Mixtral-8x7B", {"num_local_experts": 1 << 70}, "num_local_experts must be a whole number of at most 65536"),
    ("Mixtral-8x7B", {"vocab_size": 1 << 40}, "vocab_size must be a whole number of at most 2147483647"),
    ("Mixtral-8x7B", {"vocab_size": "many"}, "vocab_size must be a whole number"),
    ("Mixtral-8x7B", {"num_key_value_heads": 5}, "num_attention_heads 32 is no multiple of num_key_value_heads 5"),
    ("Mixtral-8x7B", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of only 8 experts"),
    ("Mixtral-8x7B", {"num_experts": 9}, "contradiction: num_experts = 9, num_local_experts = 8"),
    ("Mixtral-8x7B", {"quantization_config": 7}, "quantization_config must be a mapping, got 7"),
    ("Qwen3-30B-A3B", {"mlp_only_layers": 5}, "mlp_only_layers must be a list, got 5"),
    ("gpt-oss-20b", {"layer_types": "full_attention"}, "layer_types must be a list"),
    ("gpt-oss-20b", {"layer_types": [[]] * 24}, r"layer_types has \[\]"),
    ("Llama-3.1-8B", {"rope_scaling": 8}, "rope_scaling must be a mapping, got 8"),
    ("Llama-3.1-8B", {"rope_scaling": {"rope_type": []}}, r"rope_type \[\] is not supported"),
    ("Mixtral-8x7B", {"hidden_act": []}, r"hidden_act \[\] is not supported"),
    ("Mixtral-8x7B", {"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported; supported are silu"),
    ("Mixtral-8x7B", {"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq' is not supported"),
    ("Mixtral-8x7B", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type 'dynamic' is not supported"),
    ("Mixtral-8x7B", {"rms_norm_eps": 0}, "rms_norm_eps must be a number above zero"),
    ("Mixtral-8x7B", {"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
    ("Llama-3.1-8B", {"mlp_bias": True}, "mlp_bias is True; only False is supported"),
    ("Llama-3.1-8B", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
    ("Llama-3.1-8B", {"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "differs per layer type"),
    ("Llama-3.1-8B", {"num_attention_heads": 30}, "no multiple of num_attention_heads 30"),
    ("Qwen3-30B-A3B", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
    ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 24 layers"),
    ("gpt-oss-20b", {"layer_types": ["linear_attention"] * 24}, "layer_types has 'linear_attention'"),
    ("DeepSeek-V3", {"n_group": 7}, "n_group 7, topk_group 4 do not divide 256 experts"),
    ("DeepSeek-V3", {"n_group": 128, "topk_group": 1}, "num_experts_per_tok 8 of 2 experts"),
    ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
    ("DeepSeek-V2-Lite", {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1"),
    ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
    ("Phi-3.5-MoE", {"num_experts_per_tok": 3}, "PhiMoE's router always chooses 2"),
    ("Phi-3.5-MoE", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "list of 64"),
])  # fmt: skip
def test_a_wrong_key_is_named(name, change, message):
    with pytest.raises(CheckpointError, match=message):
        model_config({**PUBLISHED[name], **change})


def test_an_unknown_family_names_the_known_ones():
    with pytest.raises(
        UnknownArchitecture, match=r"'mamba' is not supported; supported are deepseek_v2, .*, qwen3_moe"
    ):
        model_config({"model_type": "mamba"})
    with pytest.raises(UnknownArchitecture, match="model_type None"):
        model_config({})
    with pytest.raises(UnknownArchitecture, match=r"model_type \['mixtral'\]"):
        model_config({"model_type": ["mixtral"]})


@pytest.fixture
def edited(tmp_path):
    """A function: checkpoint of a variant with changed tensors."""

    def edit(name, change):
        shutil.copytree(checkpoints.checkpoint(name), tmp_path / name)
        path = tmp_path / name / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        checkpoint = HfCheckpoint(tmp_path / name)
        return weight_map(checkpoint, model_config(checkpoint.config))

    return edit


def test_tensors_that_do_not_fit_the_config_are_named(edited):
    def shrink(tensors):
        tensors["model.layers.1.mlp.experts.3.down_proj.weight"] = np.zeros((48, 39), np.float32)

    with pytest.raises(
        BadTensor, match=r"model\.safetensors: .*1\.mlp\.experts\.3\.down_proj\.weight: wanted .*48, 40.* got .*48, 39"
    ):
        edited("qwen3_moe", shrink)
    with pytest.raises(BadTensor, match=r"olmoe: tensor model\.layers\.2\.self_attn\.q_norm\.weight is missing"):
        edited("olmoe", lambda tensors: tensors.pop("model.layers.2.self_attn.q_norm.weight"))
    with pytest.raises(BadTensor, match=r"q_proj\.bias \[64\] is no part of a mixtral model"):
        edited(
            "mixtral",
            lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}),
        )


def test_tensors_that_change_nothing_are_let_be(edited):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        tensors["model.layers.3.eh_proj.weight"] = np.ones((4, 4), np.float32)

    edited("llama", add)


def test_stacked_experts_as_transformers_holds_them(tmp_path):
    """Some tools save gate_up_proj and down_proj stacked; both give the same sources' numbers."""
    name = "qwen3_moe"
    shutil.copytree(checkpoints.checkpoint(name), tmp_path / name)
    state = {key: value.numpy() for key, value in checkpoints.load(name).state_dict().items()}
    assert any(key.endswith("experts.gate_up_proj") for key in state)
    save_file({key: np.ascontiguousarray(value) for key, value in state.items()}, tmp_path / name / "model.safetensors")
    both = [HfCheckpoint(folder) for folder in (checkpoints.checkpoint(name), tmp_path / name)]
    maps = [weight_map(checkpoint, model_config(checkpoint.config)) for checkpoint in both]
    for part in ("gate", "up", "down"):
        plain, stacked = (getattr(m.expert(1, 5), part).read_f32(c) for m, c in zip(maps, both, strict=True))
        assert np.array_equal(plain, stacked)
