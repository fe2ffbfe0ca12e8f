"""GGUF headers and tensors: what the writer wrote comes back; whatever is broken is a named error, quickly."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_files import embedding, llama_metadata, quantized, write_gguf
from tidegate.checkpoint import gguf_header, gguf_strings
from tidegate.checkpoint.gguf import GgufCheckpoint
from tidegate.checkpoint.gguf_header import LazyArray, read_header
from tidegate.checkpoint.gguf_strings import string_spans
from tidegate.errors import BadTensor, CheckpointError, CorruptFile, ReadFailed
from tidegate.quant import pack

TOKENS = [
    "",
    "",
    "a",
    "Ġthe",
    "x" * 300,
    "null\0null\0\0\0\0\0\0\0\0",
    "▁é",
    "y" * 70000,
    *(f"t{i}" for i in range(5000)),
]


def small_file(path, **more):
    rng = np.random.default_rng(1)
    tensors = {
        **embedding(),
        "blk.0.attn_norm.weight": np.ones(64, np.float32),
        "blk.0.attn_q.weight": quantized(rng.standard_normal((64, 64)), "Q4_0"),
        "blk.0.ffn_gate_exps.weight": quantized(rng.standard_normal((4, 96, 64)), "Q8_0"),
        "blk.0.ffn_up.weight": rng.standard_normal((96, 64)).astype(np.float16),
    }
    return write_gguf(path, "llama", llama_metadata(**more), tensors)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_file(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_metadata_of_every_kind(tmp_path):
    metadata = {
        "a.u16": np.uint16(7), "a.u32": 9, "a.i32": np.int32(-3), "a.u64": np.uint64(1 << 40), "a.f32": 0.5,
        "a.f64": np.float64(0.1), "a.bool": True, "a.text": "grüße \N{WAVE DASH}", "a.ints": [1, -2, 3], "a.floats": [0.5, 2.5],
        "a.flags": [True, False], "a.strings": TOKENS,
    }  # fmt: skip
    got = read_header(write_gguf(tmp_path / "m.gguf", "llama", metadata)).metadata
    for key, value in metadata.items():
        loaded = got[key].load() if isinstance(got[key], LazyArray) else got[key]
        assert (loaded.tolist() if isinstance(loaded, np.ndarray) else loaded) == value, key


def test_tensor_table_is_that_of_the_gguf_package(small):
    ours, theirs = read_header(small), gguf.GGUFReader(small)
    assert ours.data_offset == theirs.data_offset
    assert [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]
    for a, b in zip(ours.tensors, theirs.tensors, strict=True):
        assert (a.shape, a.dtype, a.offset, a.nbytes) == (
            tuple(int(n) for n in reversed(b.shape)), b.tensor_type.name, b.data_offset, b.n_bytes
        )  # fmt: skip


def test_rows_are_the_rows_of_the_whole(small):
    checkpoint = GgufCheckpoint(small)
    reader = {t.name: t for t in gguf.GGUFReader(small).tensors}
    for name, info in checkpoint.tensors.items():
        want = gguf.quants.dequantize(np.asarray(reader[name].data), reader[name].tensor_type)
        want = want.reshape(-1, info.shape[-1] if len(info.shape) > 1 else 1)
        np.testing.assert_array_equal(checkpoint.read_f32(name), want)
        np.testing.assert_array_equal(checkpoint.read_f32(name, 3, 9), want[3:9])
        assert checkpoint.read_f32(name, 5, 5).shape == (0, want.shape[1])
        assert checkpoint.read_raw(name).nbytes == info.nbytes
        if checkpoint.native_format(name):
            codes, scales, mins = checkpoint.read_codes(name, 1, 7)
            np.testing.assert_array_equal(
                pack.dequantize(codes, scales, mins, checkpoint.native_format(name)), want[1:7]
            )


def test_wrong_names_and_rows(small):
    checkpoint = GgufCheckpoint(small)
    with pytest.raises(BadTensor, match="there is no tensor nope"):
        checkpoint.read_f32("nope")
    with pytest.raises(BadTensor, match="has 64 rows, 60:65"):
        checkpoint.read_raw("blk.0.attn_q.weight", 60, 65)
    with pytest.raises(BadTensor, match="F32"):
        checkpoint.read_codes("token_embd.weight")


def test_a_file_cut_after_opening_is_a_failed_read(tmp_path):
    path = small_file(tmp_path / "cut.gguf")
    checkpoint = GgufCheckpoint(path)
    info = checkpoint.tensors["blk.0.ffn_up.weight"]
    with path.open("r+b") as file:
        file.truncate(info.offset + 100)
    with pytest.raises(ReadFailed) as caught:
        checkpoint.read_f32(info.name)
    assert (caught.value.offset, caught.value.wanted_bytes, caught.value.got_bytes) == (info.offset, info.nbytes, 100)


def test_an_unreadable_type_can_be_listed_but_not_read(tmp_path):
    raw = np.zeros((8, 136), np.uint8)
    path = write_gguf(tmp_path / "iq.gguf", "llama", llama_metadata(), {**embedding(), "x.weight": (raw, "IQ4_XS")})
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.tensors["x.weight"].dtype == "IQ4_XS"
    with pytest.raises(BadTensor, match=r"x\.weight is IQ4_XS"):
        checkpoint.read_f32("x.weight")


# Broken files


def test_truncation_anywhere_is_named(small, tmp_path):
    whole, header = small.read_bytes(), read_header(small)
    places = {*range(0, header.data_offset, 7), *(t.offset + d for t in header.tensors for d in (0, 1, t.nbytes - 1))}
    for length in sorted(places):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFile) as caught:
            read_header(path)
        assert caught.value.path == path and caught.value.offset <= max(length, header.data_offset + 100_000)
        assert "wanted" in str(caught.value)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_flipped_bytes_are_an_error_or_harmless(small, tmp_path_factory, data):
    whole = bytearray(small.read_bytes())
    end = read_header(small).data_offset
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(whole)
    try:
        checkpoint = GgufCheckpoint(path)
        for name in checkpoint.tensors:
            checkpoint.read_raw(name, 0, 1)
    except CheckpointError:
        pass


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_noise_is_no_gguf(tmp_path_factory, noise):
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    path.write_bytes(noise)
    with pytest.raises(CorruptFile):
        read_header(path)


def raw_header(tensors=0, metadata=b"", count=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + metadata


def text(value):
    return struct.pack("<Q", len(value)) + value


def tensor(name=b"w", dims=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (raw_header(version=1), "version"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGML" + bytes(20), "magic"),
        (raw_header(tensors=1 << 62), "tensor count"),
        (raw_header(count=1 << 40), "metadata count"),
        (raw_header(1, tensor(dims=(1 << 40, 1 << 40))), "shape of w"),
        (raw_header(1, tensor(dims=(0,))), "shape of w"),
        (raw_header(1, text(b"w") + struct.pack("<I", 9) + bytes(200)), "number of dimensions"),
        (raw_header(1, tensor(kind=77) + bytes(200)), "type of w"),
        (raw_header(1, tensor(kind=2, dims=(48,)) + bytes(200)), "row length of w"),
        (raw_header(1, tensor(offset=1 << 63) + bytes(200)), "data of w"),
        (raw_header(1, tensor(offset=8) + bytes(400)), "offset of w"),
        (raw_header(2, tensor() + tensor() + bytes(400)), "twice"),
        (raw_header(2, tensor() + tensor(b"v") + bytes(400)), "overlap"),
        (raw_header(0, text(b"k") + struct.pack("<IQ", 8, 1 << 50), 1), "length of value of k"),
        (raw_header(0, text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 60), 1), "length of k"),
        (raw_header(0, text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 61), 1), "length of k"),
        (
            raw_header(0, text(b"k") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + struct.pack("<Q", 99), 1),
            "string of k",
        ),
        (raw_header(0, text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), 1), "element type of k"),
        (raw_header(0, text(b"k") + struct.pack("<I", 13) + bytes(64), 1), "type of k"),
        (raw_header(0, text(b"\xff\xfe") + struct.pack("<II", 4, 1), 1), "UTF-8"),
        (raw_header(0, (text(b"k") + struct.pack("<II", 4, 1)) * 2, 2), "twice"),
        (raw_header(0, text(b"general.alignment") + struct.pack("<II", 4, 24), 1), "alignment"),
    ],
)
def test_absurd_headers_are_refused(tmp_path, body, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(body)
    with pytest.raises(CorruptFile, match=message):
        read_header(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be opened"):
        GgufCheckpoint(tmp_path / "none.gguf")


def test_an_array_of_empty_strings_ends(tmp_path):
    body = raw_header(0, text(b"k") + struct.pack("<IIQ", 9, 8, 50_000) + bytes(400_000), 1)
    path = tmp_path / "empty.gguf"
    path.write_bytes(body)
    assert read_header(path).metadata["k"].load() == [""] * 50_000


@given(
    st.lists(
        st.binary(max_size=12) | st.binary(min_size=250, max_size=270) | st.just(bytes(9)) | st.just(b""), max_size=60
    )
)
@settings(max_examples=200, deadline=None)
def test_string_spans_find_every_string(strings):
    raw = b"".join(text(value) for value in strings) + b"tail"
    begins, ends = string_spans(np.frombuffer(raw, np.uint8), len(strings))
    assert [raw[a:b] for a, b in zip(begins, ends, strict=True)] == strings


def test_strings_across_windows(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "w.gguf", "llama", {"t": TOKENS})
    for window, walk in ((64, 64), (1000, 300), (4096, 1 << 17)):
        monkeypatch.setattr(gguf_header, "_WINDOW_BYTES", window)
        monkeypatch.setattr(gguf_strings, "_WALK_BYTES", walk)
        assert read_header(path).metadata["t"].load() == TOKENS


# Split files


def split_files(folder, count=3):
    paths = []
    for n in range(count):
        part = {"split.no": np.uint16(n), "split.count": np.uint16(count), "split.tensors.count": np.int32(count)}
        tensors = embedding() if n == 0 else {f"blk.0.t{n}.weight": np.full((2, 32), n, np.float32)}
        path = folder / f"model-{n + 1:05}-of-{count:05}.gguf"
        paths.append(write_gguf(path, "llama", {**(llama_metadata() if n == 0 else {}), **part}, tensors))
    return paths


def test_any_part_opens_all(tmp_path):
    for path in split_files(tmp_path):
        checkpoint = GgufCheckpoint(path)
        assert set(checkpoint.tensors) == {"token_embd.weight", "blk.0.t1.weight", "blk.0.t2.weight"}
        assert (checkpoint.read_f32("blk.0.t2.weight") == 2).all()
        assert checkpoint.config["hidden_size"] == 64


def test_missing_parts_are_named(tmp_path):
    paths = split_files(tmp_path)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 parts are missing: model-00002-of-00003\.gguf"):
        GgufCheckpoint(paths[2])


def test_parts_that_do_not_belong_together(tmp_path):
    paths = split_files(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(CorruptFile, match=r"split\.no"):
        GgufCheckpoint(paths[0])


def test_a_part_with_a_foreign_name(tmp_path):
    path = split_files(tmp_path)[0].rename(tmp_path / "part.gguf")
    with pytest.raises(CheckpointError, match="00001-of-00003"):
        GgufCheckpoint(path)


def test_a_tensor_in_two_parts(tmp_path):
    paths = split_files(tmp_path)
    part = {"split.no": np.uint16(2), "split.count": np.uint16(3), "split.tensors.count": np.int32(3)}
    write_gguf(paths[2], "llama", part, {"blk.0.t1.weight": np.zeros((2, 32), np.float32)})
    with pytest.raises(BadTensor, match="duplicate"):
        GgufCheckpoint(paths[0])
