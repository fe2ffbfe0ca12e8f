"""GGUF metadata says the same as the Hugging Face config it was made from, through models/families.py."""

import json
from dataclasses import replace

import numpy as np
import pytest

from gguf_convert import REPRESENTABLE, converted
from gguf_files import embedding, llama_metadata, write_gguf
from tidegate.checkpoint.gguf import GgufCheckpoint
from tidegate.errors import CheckpointError, UnknownArchitecture
from tidegate.models.families import model_config

INTERLEAVED = ("mixtral", "llama", "granitemoe")
DEEPSEEK = [name for name in REPRESENTABLE if name.startswith("deepseek")]


@pytest.mark.parametrize(
    ("variant", "absorbed"), [*((name, True) for name in REPRESENTABLE), *((n, False) for n in DEEPSEEK)]
)
def test_config_is_that_of_the_original(variant, absorbed):
    folder, path = converted(variant, absorbed=absorbed)
    config = GgufCheckpoint(path).config
    got, want = model_config(config), model_config(json.loads((folder / "config.json").read_text()))
    assert config["tidegate_rope_interleaved"] == (variant in INTERLEAVED or variant in DEEPSEEK)
    if variant == "llama":  # llama3's formula there, its result here
        assert got.rope.scaling == "longrope" and got.rope.params["attention_factor"] == 1.0
        got = replace(got, rope=want.rope)
    got_rope, want_rope = got.rope, replace(want.rope, interleaved=got.rope.interleaved)
    assert got_rope.params == pytest.approx(
        {key: value for key, value in want_rope.params.items() if key in got_rope.params}, rel=1e-6
    )
    assert replace(got, rope=replace(got_rope, params={})) == replace(want, rope=replace(want_rope, params={}))


def test_old_and_new_expert_tensors_give_the_same_config():
    assert (
        GgufCheckpoint(converted("mixtral", stacked=False)[1]).config == GgufCheckpoint(converted("mixtral")[1]).config
    )


def edit(tmp_path, arch="llama", tensors=(), **metadata):
    base = {key.replace("llama.", f"{arch}."): value for key, value in llama_metadata().items()}
    metadata = {f"{arch}.{key}": value for key, value in metadata.items()}
    merged = {key: value for key, value in {**base, **metadata}.items() if value is not None}
    return write_gguf(tmp_path / "edited.gguf", arch, merged, {**embedding(), **dict(tensors)})


def test_an_unknown_architecture_names_the_known_ones(tmp_path):
    with pytest.raises(UnknownArchitecture, match=r"'mamba' is not supported; supported are llama, "):
        GgufCheckpoint(edit(tmp_path, "mamba"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("embedding_length", None, r"llama\.embedding_length is missing"),
        ("embedding_length", "big", "must be a whole number"),
        ("attention.layer_norm_rms_epsilon", True, "must be a number"),
        ("attention.head_count_kv", [2, 4], "differs between layers"),
        ("rope.scaling.type", "odd", "rope scaling 'odd'"),
        ("attention.head_count", 0, "heads of 0 dimensions"),
        ("block_count", 4_000_000_000, "must be 1 to 4096"),
    ],
)
def test_bad_metadata_is_named(tmp_path, key, value, message):
    with pytest.raises(CheckpointError, match=message):
        GgufCheckpoint(edit(tmp_path, **{key: value}))


def test_equal_numbers_a_layer_are_one(tmp_path):
    assert GgufCheckpoint(edit(tmp_path, **{"attention.head_count_kv": [2, 2, 2]})).config["num_key_value_heads"] == 2


def test_prediction_layers_at_the_end_are_not_counted(tmp_path):
    extra = {"blk.2.nextn.eh_proj.weight": np.zeros((4, 8), np.float32)}
    assert GgufCheckpoint(edit(tmp_path, tensors=extra, block_count=3)).config["num_hidden_layers"] == 2


def test_rope_frequencies_and_long_factors(tmp_path):
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(1, 4, 8, dtype=np.float32)
    pair = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    options = {"rope.scaling.attn_factor": 1.25, "rope.scaling.original_context_length": 64}
    scaling = GgufCheckpoint(edit(tmp_path, tensors=pair, **options)).config["rope_scaling"]
    assert scaling == {
        "rope_type": "longrope", "factor": 1.0, "attention_factor": 1.25, "original_max_position_embeddings": 64,
        "short_factor": short.tolist(), "long_factor": long.tolist(),
    }  # fmt: skip
    scaling = GgufCheckpoint(edit(tmp_path, tensors={"rope_freqs.weight": long})).config["rope_scaling"]
    assert scaling["short_factor"] == scaling["long_factor"] == long.tolist() and scaling["attention_factor"] == 1.0


def test_published_deepseek_files_without_group_counts(tmp_path):
    """The first files of DeepSeek-V3 and V2 were written before the format had keys for expert groups."""
    common = {"expert_used_count": 8, "attention.kv_lora_rank": 16, "expert_feed_forward_length": 24}
    for experts, gating, groups in ((256, 2, (8, 4)), (160, 1, (8, 3)), (64, 1, (1, 1))):
        path = edit(tmp_path, "deepseek2", expert_count=experts, expert_gating_func=gating, **common)
        config = GgufCheckpoint(path).config
        assert (config["n_group"], config["topk_group"]) == groups
        assert config["model_type"] == ("deepseek_v3" if gating == 2 else "deepseek_v2")
