"""Conversion: the bytes are what the numpy twins say, for every family and format."""

import json
import os
import shutil
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoints
from conversions import DEFAULT, EXACT, check_store, small_blocks, tree
from tidegate.checkpoint.convert import ConvertOptions, convert
from tidegate.checkpoint.convert import pack as pack_module
from tidegate.checkpoint.convert.plan import make_plan
from tidegate.checkpoint.hf import HfCheckpoint
from tidegate.checkpoint.open import open_checkpoint
from tidegate.checkpoint.store import ExpertStore
from tidegate.errors import BadTensor, CheckpointError, CorruptFile, UnknownArchitecture, UsageError
from tidegate.experts.base import ExpertKey
from tidegate.models.families import model_config, weight_map
from tidegate.quant import pack as tw
from tidegate.quant.formats import Format

__all__ = ["small_blocks"]


@pytest.mark.parametrize("name", checkpoints.VARIANTS)
def test_every_family_to_the_byte(tmp_path, small_blocks, name):
    src = checkpoints.checkpoint(name)
    store = check_store(src, convert(src, tmp_path / "auto"))
    assert {layout.fmt for layout in store.layouts} <= {Format("int4", 32, two_level=True)}
    exact = EXACT if store.layouts else replace(EXACT, experts="auto")
    check_store(src, convert(src, tmp_path / "f32", exact))


@pytest.mark.parametrize("experts", ["int4", "q4_0", "int8", "mxfp4", "bf16"])
@pytest.mark.parametrize("group", [None, 64, 128])
def test_every_format(tmp_path, small_blocks, experts, group):
    dense = {"int4": "int8", "q4_0": "int8", "int8": "int4", "mxfp4": "int4", "bf16": "int8"}[experts]
    src = checkpoints.checkpoint("qwen2_moe")
    store = check_store(src, convert(src, tmp_path / "s", ConvertOptions(experts, dense, group)))
    size = group or 32
    names = {"int4": f"int4-g{size}-m8", "q4_0": "int4-g32", "int8": f"int8-g{size}", "mxfp4": "mxfp4-g32"}
    assert str(store.layouts[0].fmt) == names.get(experts, experts)
    assert str(store.dense["layers.0.qkv"].fmt) == names[dense]
    assert all(entry.fmt is None for name, entry in store.dense.items() if name.endswith(("norm", "router", "bias")))


def test_planned_size_is_the_written_size_and_blocks_do_not_matter(tmp_path, small_blocks, monkeypatch):
    src = checkpoints.checkpoint("deepseek_v3")
    planned = make_plan(open_checkpoint(src), DEFAULT).file_bytes()
    one = convert(src, tmp_path / "one")
    monkeypatch.setattr(pack_module, "BLOCK_WEIGHTS", 1 << 21)
    two = convert(src, tmp_path / "two")
    assert planned == {name: (one / name).stat().st_size for name in planned}
    assert tree(one) == tree(two)


def mxfp4_checkpoint(base, folder):
    """gpt-oss as published: experts in MXFP4 blocks and scales, [E, rows, groups, 16]."""
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    rng = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = (experts, outputs, inputs // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8, generator=rng)
        tensors[f"{name}_scales"] = torch.randint(115, 125, blocks[:3], dtype=torch.uint8, generator=rng)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_mxfp4_is_kept_exactly(tmp_path, small_blocks, monkeypatch):
    kind, arguments = checkpoints.VARIANTS["gpt_oss"]
    monkeypatch.setitem(checkpoints.VARIANTS, "gpt_oss_64", (kind, {**arguments, "intermediate_size": 64}))
    src = mxfp4_checkpoint(checkpoints.checkpoint("gpt_oss_64"), tmp_path / "src")
    store = check_store(src, convert(src, tmp_path / "dst"))
    layout, config = store.layouts[0], store.config
    assert layout.fmt == layout.down_fmt == Format("mxfp4", 32)
    checkpoint = HfCheckpoint(src)
    up = weight_map(checkpoint, model_config(checkpoint.config)).expert(2, 5).up.read_f32(checkpoint)
    blob = store.read_blob(ExpertKey(2, 5))[layout.up_offset : layout.down_offset]
    shape = config.moe.expert_dim, config.hidden_size
    np.testing.assert_array_equal(tw.unpack(blob[: layout.fmt.packed_bytes(*shape)], layout.fmt, *shape), up)


def test_fp8_blocks_are_multiplied_out(tmp_path):
    src = shutil.copytree(checkpoints.checkpoint("deepseek_v3"), tmp_path / "src")
    plain, tensors = load_file(src / "model.safetensors"), {}
    for name, w in plain.items():
        tensors[name] = w
        if "experts" in name and name.endswith("weight") and w.dim() == 2:
            scale = w.float().abs().max() / 448
            tensors[name] = (w.float() / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(tensors, src / "model.safetensors")
    config = json.loads((src / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (src / "config.json").write_text(json.dumps(config))
    store = check_store(src, convert(src, tmp_path / "dst", EXACT))
    name = next(n for n in plain if n.endswith("experts.3.up_proj.weight"))
    layout = store.layouts[0]
    blob = store.read_blob(ExpertKey(0, 3))[layout.up_offset : layout.down_offset]
    shape = plain[name].shape
    up = tw.unpack(blob[: 4 * prod(layout.fmt.padded(*shape))], layout.fmt, *shape)
    np.testing.assert_allclose(up, plain[name].float().numpy(), atol=float(plain[name].abs().max()) / 14)


def test_tokenizer_template_and_end_tokens_come_along(tmp_path):
    src = shutil.copytree(checkpoints.checkpoint("olmoe"), tmp_path / "src")
    (src / "tokenizer.json").write_text('{"version": "1.0"}')
    (src / "chat_template.jinja").write_text("{{ messages }} é")
    (src / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    store = ExpertStore.open(convert(src, tmp_path / "dst"))
    assert store.tokenizer_json() == '{"version": "1.0"}' and store.chat_template() == "{{ messages }} é"
    assert store.special_tokens()["eos_token_ids"] == [2, 9] and store.config.eos_token_ids == (2, 9)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": "int3"}, "--experts int3: choose one of auto, int4"),
        ({"dense": "mxfp4"}, "--dense mxfp4: choose"),
        ({"group": 48}, "--group 48: choose one of 32, 64, 128"),
        ({"experts": "bf16", "dense": "f32", "group": 64}, "--group 64 has no effect"),
        ({"experts": "q4_0", "dense": "bf16", "group": 32}, "--group 32 has no effect on q4_0 experts"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message):
        ConvertOptions(**options)


def test_options_without_effect(tmp_path):
    with pytest.raises(UsageError, match="--experts int4 has no effect: a llama model has no experts"):
        convert(checkpoints.checkpoint("llama"), tmp_path / "dst", ConvertOptions(experts="int4"))


def test_destinations(tmp_path):
    src = checkpoints.checkpoint("mixtral")
    dst = convert(src, tmp_path / "a" / "b" / "dst")
    first = tree(dst)
    with pytest.raises(UsageError, match="--overwrite"):
        convert(src, dst)
    with pytest.raises(CheckpointError, match="is an expert store already"):
        convert(dst, tmp_path / "again")
    convert(src, dst, ConvertOptions(experts="int8"), overwrite=True)
    assert tree(dst) != first and not list(dst.parent.glob("*.old*")) and not list(dst.parent.glob("*.partial"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="is not a store"):
            convert(src, tmp_path / "mine", overwrite=overwrite)
    (tmp_path / "mine").rename(tmp_path / "new.partial")
    with pytest.raises(UsageError, match="is not an unfinished conversion"):
        convert(src, tmp_path / "new")
    assert (tmp_path / "new.partial" / "thesis.txt").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    assert tree(convert(src, tmp_path / "empty")) == first


def broken(tmp_path, change):
    src = shutil.copytree(checkpoints.checkpoint("mixtral"), tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    change(tensors)
    save_file(tensors, src / "model.safetensors")
    return src


W2 = "model.layers.2.block_sparse_moe.experts.7.w2.weight"


def test_wrong_shape_missing_tensor_unknown_family(tmp_path):
    src = broken(tmp_path, lambda t: t.update({W2: torch.zeros(64, 71)}))
    with pytest.raises(BadTensor, match=r"(?s)experts.7.*\[64, 71\]"):
        convert(src, tmp_path / "dst")
    shutil.rmtree(src)
    src = broken(tmp_path, lambda t: t.pop(W2))
    with pytest.raises(BadTensor, match=r"experts.7.w2.weight"):
        convert(src, tmp_path / "dst")
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps(config | {"model_type": "perceptron"}))
    with pytest.raises(UnknownArchitecture, match="perceptron"):
        convert(src, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_truncated_source(tmp_path):
    src = broken(tmp_path, lambda t: None)
    size = (src / "model.safetensors").stat().st_size
    for keep in (size - 1, size // 2):
        os.truncate(src / "model.safetensors", keep)
        with pytest.raises(CorruptFile, match=rf"truncated shard.*wanted {size:,} bytes, got {keep:,}"):
            convert(src, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_source_that_shrinks_in_the_middle_leaves_nothing(tmp_path, small_blocks):
    src = broken(tmp_path, lambda t: None)

    def shrink(done, total, what):
        os.truncate(src / "model.safetensors", 100_000)

    with pytest.raises(CheckpointError, match=r"model.safetensors: read at offset.*wanted.*got"):
        convert(src, tmp_path / "dst", progress=shrink)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_source_that_changes_in_the_middle_is_refused(tmp_path, small_blocks):
    src = broken(tmp_path, lambda t: None)
    with pytest.raises(CheckpointError, match="was changed while it was converted"):
        convert(src, tmp_path / "dst", progress=lambda *_: os.utime(src / "model.safetensors", (1, 1)))
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(tmp_path, value):
    src = broken(tmp_path, lambda t: t[W2].index_put_((torch.tensor(3),), torch.tensor(value)))
    with pytest.raises(BadTensor, match=r"experts.7.w2.weight holds a weight that is not finite"):
        convert(src, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
