"""Conversion: the bytes are what the numpy twins say, for every family and format; interrupted ones go on exactly."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import checkpoints
from tidegate.checkpoint.convert import ConvertOptions, cached_store, convert
from tidegate.checkpoint.convert import pack as pack_module
from tidegate.checkpoint.convert import partial as partial_module
from tidegate.checkpoint.convert.plan import make_plan
from tidegate.checkpoint.hf import HfCheckpoint
from tidegate.checkpoint.inventory import dense_tensors
from tidegate.checkpoint.open import open_checkpoint
from tidegate.checkpoint.store import ExpertStore
from tidegate.errors import BadTensor, CheckpointError, CorruptFile, DiskFull, UnknownArchitecture, UsageError
from tidegate.experts.base import ExpertKey
from tidegate.models.families import model_config, weight_map
from tidegate.quant import pack as tw
from tidegate.quant.formats import Format

EXACT = ConvertOptions(experts="f32", dense="f32")
DEFAULT = ConvertOptions()


def check_store(src, dst):
    """Every byte of the store, recomputed from whole matrices with the numpy twins."""
    store, checkpoint = ExpertStore.open(dst), open_checkpoint(src)
    weights = weight_map(checkpoint, model_config(checkpoint.config))

    def wanted(source, fmt):
        if fmt is None:
            return source.read_f32(checkpoint).reshape(-1).view(np.uint8)
        if fmt == source.native_format(checkpoint):
            return tw.pack_codes(*source.read_codes(checkpoint), fmt)
        return tw.pack(source.read_f32(checkpoint), fmt)

    for tensor in dense_tensors(store.config):
        packed = wanted(weights.dense(tensor.name), store.dense[tensor.name].fmt)
        np.testing.assert_array_equal(store.read_dense(tensor.name), packed, tensor.name)
        assert packed.size == store.dense[tensor.name].nbytes
    for layer, layout in enumerate(store.layouts):
        for expert in range(store.config.moe.num_experts):
            blob, sources = store.read_blob(ExpertKey(layer, expert)), weights.expert(layer, expert)
            parts = [(0, sources.gate, layout.fmt), (layout.up_offset, sources.up, layout.fmt)]
            parts.append((layout.down_offset, sources.down, layout.down_fmt))
            at = layout.bias_offset
            for bias in (sources.gate_bias, sources.up_bias, sources.down_bias) if layout.has_bias else ():
                parts.append((at, bias, None))
                at += -(-4 * bias.shape(checkpoint)[0] // 64) * 64
            expected = np.zeros(layout.blob_bytes, np.uint8)
            for offset, source, fmt in parts:
                packed = wanted(source, fmt)
                expected[offset : offset + packed.size] = packed
            np.testing.assert_array_equal(blob, expected)
    store.verify()
    return store


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks and many syncs even for tiny checkpoints."""
    monkeypatch.setattr(pack_module, "BLOCK_WEIGHTS", 1500)
    monkeypatch.setattr(partial_module, "_SYNC_BYTES", 20_000)


@pytest.mark.parametrize("name", checkpoints.VARIANTS)
def test_every_family_to_the_byte(tmp_path, small_blocks, name):
    src = checkpoints.checkpoint(name)
    store = check_store(src, convert(src, tmp_path / "auto"))
    assert {layout.fmt for layout in store.layouts} <= {Format("int4", 32)}
    exact = EXACT if store.layouts else replace(EXACT, experts="auto")
    check_store(src, convert(src, tmp_path / "f32", exact))


@pytest.mark.parametrize("experts", ["int4", "int8", "mxfp4", "bf16"])
@pytest.mark.parametrize("group", [None, 64, 128])
def test_every_format(tmp_path, small_blocks, experts, group):
    dense = {"int4": "int8", "int8": "int4", "mxfp4": "int4", "bf16": "int8"}[experts]
    src = checkpoints.checkpoint("qwen2_moe")
    store = check_store(src, convert(src, tmp_path / "s", ConvertOptions(experts, dense, group)))
    expected_group = {"mxfp4": 32, "bf16": 0}.get(experts, group or 32)
    assert store.layouts[0].fmt == Format(experts, expected_group)
    assert store.dense["layers.0.qkv"].fmt == Format(dense, group or 32)
    assert all(entry.fmt is None for name, entry in store.dense.items() if name.endswith(("norm", "router", "bias")))


def test_planned_size_is_the_written_size_and_blocks_do_not_matter(tmp_path, small_blocks, monkeypatch):
    src = checkpoints.checkpoint("deepseek_v3")
    planned = make_plan(open_checkpoint(src), DEFAULT).file_bytes()
    one = convert(src, tmp_path / "one")
    monkeypatch.setattr(pack_module, "BLOCK_WEIGHTS", 1 << 21)
    two = convert(src, tmp_path / "two")
    assert planned == {name: (one / name).stat().st_size for name in planned}
    assert tree(one) == tree(two)


def tree(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


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
    with pytest.raises(CheckpointError, match="is a converted store already"):
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


# ---- the disk


def test_a_disk_too_small_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 50, 50, 50, 0, 0, 0, 0, 255)))
    with pytest.raises(DiskFull, match=r"needs 1,\d+,\d+ B of disk, 204,800 B are free"):
        convert(checkpoints.checkpoint("mixtral"), tmp_path / "dst")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB; skips where the user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tidegate-test", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs privileges")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_in_the_middle(small_disk, small_blocks):
    def fill(done, total, what):
        if not (small_disk / "other").exists() and done > total // 2:
            with (small_disk / "other").open("wb") as file, pytest.raises(OSError, match="No space"):
                while True:
                    file.write(bytes(100_000))
                    file.flush()

    with pytest.raises(DiskFull, match=r"experts.bin: needs [\d,]+ B of disk, 0 B are free"):
        convert(checkpoints.checkpoint("mixtral"), small_disk / "dst", progress=fill)
    assert [path.name for path in small_disk.iterdir()] == ["other"]


def test_a_file_size_limit(tmp_path):
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        from tidegate.checkpoint.convert import convert
        convert(SRC, DST)
    """
    done = run_child(code, checkpoints.checkpoint("mixtral"), tmp_path / "dst")
    assert done.returncode == 1 and re.search(r"CheckpointError: .*: cannot be written: File too large", done.stderr)
    assert not list(tmp_path.iterdir())


# ---- kill -9, Ctrl-C, resume


def run_child(code, src, dst, **popen):
    code = f"SRC, DST = {str(src)!r}, {str(dst)!r}\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **popen)


STOP_AT = """
    import os, signal
    from tidegate.checkpoint.convert import convert, pack, partial
    pack.BLOCK_WEIGHTS, partial._SYNC_BYTES = 1500, 20_000
    blocks = 0
    def progress(done, total, what):
        global blocks
        blocks += 1
        if blocks == AT:
            os.kill(os.getpid(), SIGNAL)
    convert(SRC, DST, progress=progress)
"""


@pytest.mark.parametrize("at", [1, 2, 40, 100, 250])
def test_killed_and_resumed_is_the_same_to_the_byte(tmp_path, small_blocks, at):
    src, dst = checkpoints.checkpoint("mixtral"), tmp_path / "dst"
    done = run_child(f"AT, SIGNAL = {at}, 9\n" + textwrap.dedent(STOP_AT), src, dst)
    assert done.returncode == -9, done.stderr
    assert not dst.exists() and (tmp_path / "dst.partial").exists()
    starts = []
    convert(src, dst, progress=lambda done, total, what: starts.append(done))
    if at >= 100:
        assert starts[0] > 50_000
    whole = convert(src, tmp_path / "whole")
    assert tree(dst) == tree(whole) and not (tmp_path / "dst.partial").exists()


def interrupted(tmp_path, src, at=150):
    """A partial conversion of ``src`` in this process, stopped by Ctrl-C after some blocks."""
    seen = []

    def progress(done, total, what):
        seen.append(done)
        if len(seen) == at:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        convert(src, tmp_path / "dst", progress=progress)
    assert not (tmp_path / "dst").exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("convert")]
    return tmp_path / "dst.partial", seen[-1]


def test_ctrl_c_keeps_what_is_done(tmp_path, small_blocks):
    src = checkpoints.checkpoint("mixtral")
    _, reached = interrupted(tmp_path, src)
    starts = []
    convert(src, tmp_path / "dst", progress=lambda done, total, what: starts.append(done))
    assert starts[0] > reached - 30_000  # all but the unfinished unit
    check_store(src, tmp_path / "dst")


@given(keep=st.floats(0, 1))
@settings(max_examples=8, deadline=None)
def test_a_torn_journal_costs_time_only(tmp_path_factory, keep):
    folder = tmp_path_factory.mktemp("torn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_module, "BLOCK_WEIGHTS", 1500)
        patch.setattr(partial_module, "_SYNC_BYTES", 20_000)
        src = checkpoints.checkpoint("mixtral")
        partial, _ = interrupted(folder, src)
        os.truncate(partial / "journal", int(keep * (partial / "journal").stat().st_size))
        interrupted(folder, src, at=20)  # appends to what was left
        assert tree(convert(src, folder / "dst")) == tree(convert(src, folder / "whole"))
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["options", "source"])
def test_another_conversion_starts_anew(tmp_path, small_blocks, what):
    src = shutil.copytree(checkpoints.checkpoint("mixtral"), tmp_path / "src")
    interrupted(tmp_path, src)
    options = DEFAULT
    if what == "options":
        options = ConvertOptions(experts="int8")
    else:
        tensors = load_file(src / "model.safetensors")
        tensors["model.embed_tokens.weight"] *= 2
        save_file(tensors, src / "model.safetensors")
    starts = []
    convert(src, tmp_path / "dst", options, progress=lambda done, total, what: starts.append(done))
    assert starts[0] < 10_000
    check_store(src, tmp_path / "dst")


def test_what_appears_at_dst_meanwhile_is_not_replaced(tmp_path):
    def appear(done, total, what):
        (tmp_path / "dst").mkdir(exist_ok=True)
        (tmp_path / "dst" / "thesis.txt").write_text("precious")

    with pytest.raises(CheckpointError, match="cannot be written: Directory not empty"):
        convert(checkpoints.checkpoint("mixtral"), tmp_path / "dst", progress=appear)
    assert list(tree(tmp_path / "dst")) == ["thesis.txt"] and not (tmp_path / "dst.partial").exists()


def test_killed_just_before_the_end(tmp_path, small_blocks):
    code = """
        import os
        from pathlib import Path
        from tidegate.checkpoint.convert import convert, pack
        pack.BLOCK_WEIGHTS = 1500
        Path.rename = lambda *_: os.kill(os.getpid(), 9)
        convert(SRC, DST)
    """
    src, dst = checkpoints.checkpoint("mixtral"), tmp_path / "dst"
    assert run_child(code, src, dst).returncode == -9 and (tmp_path / "dst.partial" / "manifest.json").exists()
    starts = []
    convert(src, dst, progress=lambda done, total, what: starts.append(done / total))
    assert starts == [1] and tree(dst) == tree(convert(src, tmp_path / "whole"))


def test_two_conversions_into_one_folder(tmp_path, small_blocks):
    src, errors = checkpoints.checkpoint("mixtral"), []

    def second(done, total, what):
        if not errors:
            with pytest.raises(UsageError, match="another process is converting") as error:
                convert(src, tmp_path / "dst")
            errors.append(error.value)

    check_store(src, convert(src, tmp_path / "dst", progress=second))
    assert errors


# ---- memory


def test_peak_memory_is_bounded_and_does_not_grow_with_the_model(tmp_path):
    """docs/format.md: at most 160 MiB, whatever the model."""
    rng = np.random.default_rng(0)
    tensors = load_file(checkpoints.checkpoint("llama") / "model.safetensors")
    big = torch.from_numpy(rng.standard_normal((400_000, 64), dtype=np.float32))  # 102 MB
    tensors |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), big)
    src = shutil.copytree(checkpoints.checkpoint("llama"), tmp_path / "src")
    save_file({name: w.clone() for name, w in tensors.items()}, src / "model.safetensors")
    config = json.loads((src / "config.json").read_text()) | {"vocab_size": 400_000, "tie_word_embeddings": False}
    (src / "config.json").write_text(json.dumps(config))
    code = """
        import re
        from pathlib import Path
        from tidegate.checkpoint.convert import ConvertOptions, convert
        convert(SRC, DST, ConvertOptions(dense="int4"))
        print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
    """
    done = run_child(code, src, tmp_path / "dst")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 160 << 10, f"{int(done.stdout):,} KiB"


# ---- the cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cached_store_converts_once_and_says_so(tmp_path, cache):
    src, said = shutil.copytree(checkpoints.checkpoint("olmoe"), tmp_path / "src"), []
    store = cached_store(src, say=said.append)
    assert store.parent == cache and len(said) == 1 and "converting" in said[0] and str(store) in said[0]
    assert cached_store(src, say=said.append) == store and len(said) == 1
    assert cached_store(store) == store
    assert cached_store(src, ConvertOptions(experts="int8"), say=said.append) != store and len(said) == 2
    os.utime(src / "model.safetensors", (1, 1))
    assert cached_store(src, say=said.append) != store and len(said) == 3


def test_two_processes_share_one_conversion(tmp_path, cache):
    code = """
        import sys
        from tidegate.checkpoint.convert import cached_store
        print(cached_store(SRC, say=lambda message: print(message, file=sys.stderr)))
    """
    src, results = checkpoints.checkpoint("olmoe"), []
    threads = [threading.Thread(target=lambda: results.append(run_child(code, src, ""))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result.returncode == 0 for result in results), results
    assert len({result.stdout for result in results}) == 1
    assert sum(result.stderr.count("converting") for result in results) == 1
    check_store(src, Path(results[0].stdout.strip()))


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="set TIDEGATE_CACHE"):
        cached_store(checkpoints.checkpoint("olmoe"))
