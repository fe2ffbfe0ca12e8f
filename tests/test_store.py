"""The expert store: what is opened, what is refused, and that verify finds every flipped byte."""

import json
import shutil
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoints
from tidegate.checkpoint import manifest as mf
from tidegate.checkpoint.convert import convert
from tidegate.checkpoint.store import ExpertStore
from tidegate.errors import BadTensor, CheckpointError, CorruptFile
from tidegate.experts.base import ExpertKey


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return convert(checkpoints.checkpoint("gpt_oss"), tmp_path_factory.mktemp("store") / "good")


@pytest.fixture
def copy(good, tmp_path):
    return shutil.copytree(good, tmp_path / "copy")


def flip(path, at, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def rewrite_manifest(folder, change):
    """Apply ``change`` to the manifest's JSON and sign it again."""
    data = json.loads((folder / "manifest.json").read_text())
    change(data)
    data.pop("crc32")
    data["crc32"] = zlib.crc32(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())
    (folder / "manifest.json").write_text(json.dumps(data))


def test_a_good_store_verifies_and_says_what_it_is(good):
    store = ExpertStore.open(good)
    seen = []
    store.verify(lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]
    assert store.config.family == "gpt_oss" and len(store.layouts) == store.config.num_moe_layers
    assert store.dense_path.stat().st_size == store.dense_bytes and store.dense_bytes % 4096 == 0
    assert store.paths[0].stat().st_size == store.expert_bytes
    assert all(entry.offset % 64 == 0 for entry in store.dense.values())
    offsets = [
        store.blob(ExpertKey(layer, expert)).offset
        for layer in range(len(store.layouts))
        for expert in range(store.config.moe.num_experts)
    ]
    assert offsets == list(range(0, store.expert_bytes, store.layouts[0].blob_bytes))
    assert json.loads((good / "config.json").read_text())["model_type"] == "gpt_oss"


def test_reads_are_checked(copy):
    store = ExpertStore.open(copy)
    key = ExpertKey(1, 3)
    blob = store.blob(key)
    assert zlib.crc32(store.read_blob(key)) == blob.crc32
    flip(store.paths[0], blob.offset + 17)
    flip(store.dense_path, store.dense["layers.2.qkv"].offset)
    with pytest.raises(CorruptFile, match=rf"expert 3 of MoE layer 1.*offset {blob.offset:,}: wanted {blob.crc32:08x}"):
        store.read_blob(key)
    with pytest.raises(CorruptFile, match=r"layers.2.qkv"):
        store.read_dense("layers.2.qkv")
    with pytest.raises(BadTensor, match="no tensor nothing"):
        store.read_dense("nothing")


@given(
    where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), file=st.sampled_from(["experts.bin", "dense.bin"])
)
@settings(max_examples=40, deadline=None)
def test_verify_finds_any_flipped_bit(good, where, bit, file):
    store = ExpertStore.open(good)
    if file == "experts.bin":
        at = int(where * store.expert_bytes)
        start = at - at % store.layouts[0].blob_bytes
    else:
        entries = list(store.dense.values())
        entry = entries[int(where * len(entries))]
        at, start = entry.offset + int(where * entry.nbytes), entry.offset
    flip(good / file, at, bit)
    try:
        with pytest.raises(CorruptFile) as error:
            store.verify()
        assert error.value.path == good / file and error.value.offset == start
    finally:
        flip(good / file, at, bit)


@pytest.mark.parametrize("file", ["experts.bin", "dense.bin", "config.json"])
@pytest.mark.parametrize("change", ["one byte less", "half", "one byte more", "gone"])
def test_files_of_the_wrong_size_are_refused(copy, file, change):
    data = (copy / file).read_bytes()
    size = {"one byte less": len(data) - 1, "half": len(data) // 2, "one byte more": len(data) + 1, "gone": None}[
        change
    ]
    if size is None:
        (copy / file).unlink()
        with pytest.raises(CheckpointError, match=rf"{file}: cannot be opened"):
            ExpertStore.open(copy)
        return
    (copy / file).write_bytes((data + b"\0")[:size])
    with pytest.raises(CorruptFile, match=rf"{file}: size of the file.*wanted {len(data):,} bytes, got {size:,}"):
        ExpertStore.open(copy)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_change_of_the_manifest_is_refused_or_means_the_same(good, data):
    path = good / "manifest.json"
    text = path.read_bytes()
    at = data.draw(st.integers(0, len(text) - 1))
    before = mf.read_manifest(good)
    flip(path, at, data.draw(st.integers(0, 7)))
    try:
        assert mf.read_manifest(good) == before
    except CheckpointError:
        pass
    finally:
        path.write_bytes(text)


CHANGES = {
    "version": (lambda d: d.update(version=2), CheckpointError, "version 2, this Tidegate reads 1"),
    "kind": (lambda d: d.update(kind="zip"), CheckpointError, "not the manifest of an expert store"),
    "missing tensor": (lambda d: d["dense"]["tensors"].pop(3), BadTensor, "layers.0.qkv_bias is missing"),
    "shape": (lambda d: d["dense"]["tensors"][0].update(shape=[250, 64]), BadTensor, r"\[250, 64\], the config says \[251, 64\]"),
    "format": (lambda d: d["dense"]["tensors"][0].update(fmt="int3-g32"), CorruptFile, "no such weight format"),
    "plain matrix": (lambda d: d["dense"]["tensors"][0].update(fmt=None), BadTensor, "embed is plain"),
    "offset": (lambda d: d["dense"]["tensors"][1].update(offset=64), CorruptFile, "place of layers.0.attn_norm"),
    "beyond the end": (lambda d: d["experts"]["layers"][1].update(offset=1 << 40), CorruptFile, "experts of MoE layer 1"),
    "a checksum too few": (lambda d: d["experts"]["layers"][1]["crc32s"].pop(), CorruptFile, "experts of MoE layer 1"),
    "a layer too few": (lambda d: d["experts"]["layers"].pop(), BadTensor, "3 layers of experts, the config says 4"),
    "a stranger": (
        lambda d: d["dense"]["tensors"].append(dict(d["dense"]["tensors"][0], name="x")), BadTensor, "x does not belong",
    ),
    "no config": (lambda d: d.pop("config"), CorruptFile, "structure of the manifest"),
    "unknown key": (lambda d: d["config"].update(colour=1), CorruptFile, "structure of the manifest.*colour"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_signed_manifest_that_contradicts_itself_is_refused(copy, name):
    change, error, message = CHANGES[name]
    rewrite_manifest(copy, change)
    with pytest.raises(error, match=message):
        ExpertStore.open(copy)


def test_an_unsigned_change_is_refused(copy):
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"norm_eps": 1e-05', '"norm_eps": 1e-06'))
    with pytest.raises(CorruptFile, match="checksum of the manifest"):
        ExpertStore.open(copy)


def test_manifest_text_is_reproducible(good):
    text = (good / "manifest.json").read_text()
    assert mf.to_json(mf.read_manifest(good)) == text


def test_folders_without_manifest(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest.json: cannot be read"):
        ExpertStore.open(tmp_path)


def test_padding_between_tensors_is_zero(good):
    store = ExpertStore.open(good)
    data = np.fromfile(store.dense_path, np.uint8)
    for entry in store.dense.values():
        data[entry.offset : entry.offset + entry.nbytes] = 0
    assert not data.any()
