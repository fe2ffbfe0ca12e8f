"""Traces: what is written is read back, in bounded pieces, and anything broken is named."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tidegate.errors import CorruptFile, UsageError
from tidegate.experts import trace as trace_module
from tidegate.experts.trace import TraceMeta, TraceReader, TraceWriter, sketch_matrix
from tidegate.experts.trace_import import import_arrays, import_npz
from tidegate.models.guesses import Guess


def _write(path: Path, steps: int = 30, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    writer = TraceWriter(path, TraceMeta(num_layers=3, num_experts=300, num_experts_per_tok=2, source="test"))
    written = []
    for step in range(steps):
        rows = int(rng.integers(1, 5))
        tokens = rng.integers(0, 1000, rows)
        writer.begin_step(np.arange(rows), np.full(rows, step), tokens)
        layers = [(rng.integers(0, 300, (rows, 2), dtype=np.int32), rng.random((rows, 2))) for _ in range(3)]
        for ids, weights in layers:
            writer.record(ids, weights)
        writer.end_step()
        written.append((tokens, np.stack([ids for ids, _ in layers], axis=1)))
    writer.close()
    return written


@pytest.mark.parametrize(("limit", "value"), [("CHUNK_ROWS", 10), ("CHUNK_BYTES", 500)])
def test_round_trip_in_several_chunks(tmp_path, monkeypatch, limit, value):
    monkeypatch.setattr(trace_module, limit, value)
    written = _write(tmp_path / "t.trace")
    reader = TraceReader(tmp_path / "t.trace")
    chunks = list(reader)
    assert len(chunks) > 3
    assert max(len(chunk.step) for chunk in chunks) < 20
    np.testing.assert_array_equal(
        np.concatenate([c.experts for c in chunks]), np.concatenate([ids for _, ids in written])
    )
    np.testing.assert_array_equal(
        np.concatenate([c.token for c in chunks]), np.concatenate([tokens for tokens, _ in written])
    )
    steps = np.concatenate([c.step for c in chunks])
    assert steps[0] == 0 and steps[-1] == 29 and (np.diff(steps) >= 0).all()
    assert reader.meta.source == "test"
    assert not list(tmp_path.glob("*.partial"))


def test_guesses_come_back_and_belong_to_the_layer_that_they_are_about(tmp_path):
    path = tmp_path / "t.trace"
    writer = TraceWriter(path, TraceMeta(3, 300, 2, guess_reach=2, guess_width=3))
    guessed = {(1, 1): [[299, 5], [1, 2]], (2, 0): [[7, 8], [9, 10]], (2, 1): [[3, 4], [5, 6]]}
    for _ in range(2):
        writer.begin_step(np.zeros(2), np.arange(2), np.zeros(2))
        for layer in range(3):
            writer.record(np.zeros((2, 2), np.int32), np.ones((2, 2)))
            for distance in (0, 1):
                if (layer, distance) in guessed:
                    margins = [[distance / 4] * 2] * 2
                    writer.record_guess(Guess(layer, distance, guessed[layer, distance], margins))
        writer.end_step()
    writer.close()
    reader = TraceReader(path)
    assert (reader.meta.version, reader.meta.guess_reach) == (4, 2)
    (chunk,) = reader
    assert chunk.guesses.shape == chunk.margins.shape == (4, 3, 2, 3)
    assert np.isnan(chunk.margins[:, 0]).all() and np.isnan(chunk.margins[:, 1, 0]).all()
    for (layer, distance), ranked in guessed.items():
        assert chunk.guesses[:, layer, distance, :2].tolist() == ranked * 2
        margins = chunk.margins[:, layer, distance]
        assert (margins[:, :2] == distance / 4).all() and np.isnan(margins[:, 2]).all()
    broken = io.BytesIO()
    np.save(broken, np.full_like(chunk.guesses, 300))
    _rewrite(path, "00000/guesses.npy", broken.getvalue())
    with pytest.raises(CorruptFile, match=r"expert id in 00000/guesses"):
        list(TraceReader(path))


@pytest.mark.parametrize("version", [2, 3])
def test_guesses_of_older_versions_were_made_elsewhere_and_are_left_out(tmp_path, version):
    path = tmp_path / "t.trace"
    meta = TraceMeta(2, 8, 1, guess_reach=2, guess_width=1, guess_curves=((1.0, 0.0, 0.0),) * 2)
    writer = TraceWriter(path, meta)
    writer.begin_step(np.zeros(1), np.zeros(1), np.zeros(1))
    for layer in range(2):
        writer.record(np.full((1, 1), layer, np.int32), np.ones((1, 1)))
    writer.record_guess(Guess(1, 1, [[3]], [[0.5]]))
    writer.end_step()
    writer.close()
    with zipfile.ZipFile(path) as archive:
        data = json.loads(archive.read("meta.json"))
    _rewrite(path, "meta.json", json.dumps({**data, "version": version}).encode())
    reader = TraceReader(path)
    assert (reader.meta.version, reader.meta.guess_reach, reader.meta.guess_curves) == (version, 0, ())
    (chunk,) = reader
    assert chunk.experts.tolist() == [[[0], [1]]] and chunk.guesses.size == 0


def test_nothing_appears_before_close_and_discard_leaves_nothing(tmp_path):
    writer = TraceWriter(tmp_path / "t.trace", TraceMeta(1, 4, 1))
    assert not (tmp_path / "t.trace").exists()
    writer.discard()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [0, 1, 100, -1, -30])
def test_a_truncated_trace_is_a_named_error(tmp_path, cut):
    path = tmp_path / "t.trace"
    _write(path)
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    with pytest.raises(CorruptFile, match=r"t\.trace"):
        list(TraceReader(path))


def test_every_flipped_byte_is_read_or_named(tmp_path):
    path = tmp_path / "t.trace"
    _write(path, steps=5)
    data = bytearray(path.read_bytes())
    for position in range(0, len(data), 7):
        broken = bytearray(data)
        broken[position] ^= 0xFF
        path.write_bytes(broken)
        try:
            list(TraceReader(path))
        except CorruptFile as error:
            assert "t.trace" in str(error)


def _rewrite(path: Path, member: str, data: bytes) -> None:
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    members[member] = data
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members.items():
            new.writestr(name, content)


def test_a_future_version_says_so(tmp_path):
    path = tmp_path / "t.trace"
    _write(path, steps=2)
    meta = json.loads(zipfile.ZipFile(path).read("meta.json"))
    _rewrite(path, "meta.json", json.dumps({**meta, "version": 9}).encode())
    with pytest.raises(CorruptFile, match=r"trace version.*wanted 1 or 2 or 3 or 4, got 9"):
        TraceReader(path)


def test_an_array_that_claims_to_be_huge_is_refused_before_it_is_allocated(tmp_path):
    path = tmp_path / "t.trace"
    _write(path, steps=2)
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999999, 3, 2), }"
    header += b" " * (118 - len(header)) + b"\n"
    _rewrite(path, "00000/experts.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(CorruptFile, match="experts"):
        list(TraceReader(path))


def test_a_missing_trace_and_an_expert_out_of_range(tmp_path):
    with pytest.raises(UsageError, match="no such trace"):
        TraceReader(tmp_path / "none.trace")
    path = tmp_path / "t.trace"
    import_arrays(path, np.full((3, 2, 1), 7, np.uint8), np.array([0, 1, 3]), num_experts=8)
    (chunk,) = TraceReader(path)
    assert chunk.sequence.tolist() == [0, 1, 1] and chunk.position.tolist() == [0, 0, 1]
    meta = json.loads(zipfile.ZipFile(path).read("meta.json"))
    _rewrite(path, "meta.json", json.dumps({**meta, "num_experts": 5}).encode())
    with pytest.raises(CorruptFile, match=r"expert id.*wanted < 5, got 7"):
        list(TraceReader(path))
    with pytest.raises(UsageError, match="offsets must rise"):
        import_arrays(path, np.zeros((3, 2, 1), np.uint8), np.array([0, 5]), num_experts=8)


def test_a_failed_step_is_forgotten(tmp_path):
    writer = TraceWriter(tmp_path / "t.trace", TraceMeta(2, 4, 1))
    for token, layers in ((1, 2), (2, 1), (3, 2)):
        writer.begin_step(np.zeros(1), np.zeros(1), np.array([token]))
        for layer in range(layers):
            writer.record(np.full((1, 1), layer), np.ones((1, 1)))
        if layers == 2:
            writer.end_step()
    writer.close()
    (chunk,) = TraceReader(tmp_path / "t.trace")
    assert chunk.token.tolist() == [1, 3] and chunk.step.tolist() == [0, 1]


def test_sketches_keep_inner_products(tmp_path):
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((2, 512)).astype(np.float32)
    writer = TraceWriter(tmp_path / "t.trace", TraceMeta(1, 4, 1, sketch_dims=256))
    writer.begin_step(np.zeros(2), np.arange(2), np.zeros(2))
    writer.record(np.zeros((2, 1), np.int32), np.ones((2, 1)), hidden)
    writer.end_step()
    writer.close()
    (chunk,) = TraceReader(tmp_path / "t.trace")
    assert chunk.sketch.shape == (2, 1, 256)
    np.testing.assert_allclose(chunk.sketch[:, 0], hidden @ sketch_matrix(512, 256), atol=2e-2)
    assert abs((chunk.sketch[0, 0].astype(float) ** 2).sum() / (hidden[0] ** 2).sum() - 1) < 0.3


@pytest.mark.parametrize(
    ("key", "value"), [("num_layers", 0), ("num_layers", 10**9), ("num_experts", "x"), ("num_experts_per_tok", -1)]
)
def test_an_absurd_shape_is_named_before_anything_is_made_of_it(tmp_path, key, value):
    path = tmp_path / "t.trace"
    _write(path, steps=2)
    meta = json.loads(zipfile.ZipFile(path).read("meta.json"))
    _rewrite(path, "meta.json", json.dumps({**meta, key: value}).encode())
    with pytest.raises(CorruptFile, match=r"meta\.json"):
        TraceReader(path)


def test_plain_arrays_are_imported_with_their_categories(tmp_path):
    rng = np.random.default_rng(2)
    experts = rng.integers(0, 8, (9000, 2, 2)).astype(np.uint8)
    arrays = {"experts": experts, "offsets": np.array([0, 5000, 9000]), "category": np.array(["code", "prose"])}
    np.savez(tmp_path / "a.npz", **arrays, token=np.arange(9000))
    import_npz(tmp_path / "a.npz", tmp_path / "t.trace", num_experts=8)
    reader = TraceReader(tmp_path / "t.trace")
    chunks = list(reader)
    np.testing.assert_array_equal(np.concatenate([c.experts for c in chunks]), experts)
    assert np.concatenate([c.step for c in chunks]).tolist() == list(range(9000))
    assert reader.categories == {0: "code", 1: "prose"} and chunks[-1].position[-1] == 3999


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"experts": np.zeros((3, 2, 1), np.uint8)}, "no offsets"),
        ({"experts": np.zeros((3, 2), np.uint8), "offsets": np.array([0, 3])}, r"\[T, L, K\]"),
        ({"experts": np.full((3, 2, 1), 9, np.uint8), "offsets": np.array([0, 3])}, "ids reach 9"),
        (
            {"experts": np.zeros((3, 2, 1), np.uint8), "offsets": np.array([0, 3]), "token": np.zeros(2)},
            "token has shape",
        ),
    ],
)
def test_arrays_that_cannot_be_a_trace_are_named(tmp_path, arrays, said):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UsageError, match=said):
        import_npz(tmp_path / "a.npz", tmp_path / "t.trace", num_experts=8)
    (tmp_path / "a.npz").write_bytes(b"nonsense")
    with pytest.raises(CorruptFile, match="plain arrays"):
        import_npz(tmp_path / "a.npz", tmp_path / "t.trace", num_experts=8)
