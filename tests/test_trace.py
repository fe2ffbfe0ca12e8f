"""Traces: what is written is read back, in bounded pieces, and anything broken is named."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tidegate.errors import CorruptFile, UsageError
from tidegate.experts import trace as trace_module
from tidegate.experts.trace import TraceMeta, TraceReader, TraceWriter, import_arrays


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


def test_round_trip_in_several_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "CHUNK_ROWS", 10)
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
    with pytest.raises(CorruptFile, match=r"trace version.*wanted 1, got 9"):
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
