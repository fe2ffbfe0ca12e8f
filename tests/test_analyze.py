"""``tidegate analyze``: statistics of routing whose truth is known, and the report as files."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tidegate.cli import main
from tidegate.experts.trace import TraceMeta, TraceReader, TraceWriter
from tidegate.experts.trace_import import import_arrays
from tidegate.sim import analysis
from tidegate.sim.analyze import analyze
from tidegate.sim.rows import Rows, read_rows

TRACE = Path(__file__).parent / "data" / "gpt-oss-20b.trace"
EXPERTS, TOP = 16, 2


def _rows(experts: np.ndarray, lengths: list[int]) -> Rows:
    offsets = np.cumsum([0, *lengths])
    tokens, sketches = np.zeros(len(experts), np.int32), np.empty((len(experts), 1, 0))
    return Rows(list(range(len(lengths))), offsets, tokens, experts, sketches, EXPERTS)


def _independent(rng: np.random.Generator, count: int, heat: np.ndarray) -> np.ndarray:
    return np.array([rng.choice(EXPERTS, TOP, replace=False, p=heat) for _ in range(count)], np.uint8)[:, None]


@pytest.fixture(scope="module")
def even() -> Rows:
    return _rows(_independent(np.random.default_rng(0), 3000, np.full(EXPERTS, 1 / EXPERTS)), [1500, 1500])


@pytest.fixture(scope="module")
def bursts() -> Rows:
    """Two experts for 250 tokens, then two others."""
    rng = np.random.default_rng(1)
    parts = [np.tile(rng.choice(EXPERTS, TOP, replace=False), (250, 1)) for _ in range(24)]
    return _rows(np.concatenate(parts).astype(np.uint8)[:, None], [3000, 3000])


def test_even_routing_looks_even(even):
    load = analysis.load(even)
    assert load["entropy_ratio"] > 0.99 and 0.25 < load["top_quarter_ratio"] < 0.3 and load["unused_experts"] == 0
    assert np.sum(load["use_ratio_per_layer"]) == pytest.approx(TOP, abs=1e-3)
    lag = analysis.overlap(even)
    assert lag["independent_ratio"] == pytest.approx(TOP / EXPERTS, rel=0.02)
    assert np.allclose(lag["overlap_ratio"], TOP / EXPERTS, atol=0.02)
    steady = analysis.stability(even)
    assert steady["variance_ratio"] == pytest.approx(1, abs=0.35) and abs(steady["autocorrelation"]) < 0.3
    sizes = analysis.working_set(even)
    expected = [EXPERTS * (1 - (1 - TOP / EXPERTS) ** window) for window in sizes["windows_tokens"]]
    np.testing.assert_allclose(sizes["distinct_experts"], expected, rtol=0.03)
    union = analysis.unions(even)
    assert union["batches"] == [1, 2] and union["distinct_experts"][1] == pytest.approx(expected[1], rel=0.05)
    assert analysis.pairs(even)["group_share_ratio"] == pytest.approx(1, abs=0.15)


def test_bursts_look_like_bursts(bursts):
    lag = analysis.overlap(bursts)
    assert lag["overlap_ratio"][0] > 0.98 and lag["overlap_ratio"][-1] < 0.4
    assert analysis.stability(bursts)["variance_ratio"] > 20
    assert analysis.working_set(bursts)["distinct_experts"][4] < 2.5
    curves = analysis.hit_curves(bursts, 3000)
    assert all(curves["hit_ratio"][name][0] > 0.98 for name in ("lru", "belady"))


def test_planted_pairs_and_categories_are_found():
    rng = np.random.default_rng(2)
    partner = rng.permutation(EXPERTS).reshape(8, 2)
    rows, names = [], {}
    for sequence in range(8):
        own = partner[:4] if sequence % 2 else partner[4:]
        rows.append(own[rng.integers(0, 4, 200)])
        names[sequence] = "odd" if sequence % 2 else "even"
    data = _rows(np.concatenate(rows).astype(np.uint8)[:, None], [200] * 8)
    found = analysis.pairs(data)
    assert found["group_share_ratio"] > 1.5 and found["strongest_pairs"][0]["lift"] > 5
    kinds = analysis.categories(data, names)
    assert kinds["kinds"] == ["even", "odd"]
    assert kinds["own_hit_ratio"] > kinds["shared_hit_ratio"] > kinds["other_hit_ratio"] == 0
    assert analysis.categories(data, {0: "even"})["own_hit_ratio"] is None


def test_a_recorded_batch_is_analyzed_as_its_sequences(tmp_path):
    writer = TraceWriter(tmp_path / "t.trace", TraceMeta(1, 8, 1))
    for position in range(4):
        writer.begin_step(np.array([7, 3]), np.full(2, position), np.zeros(2))
        writer.record(np.array([[position], [position + 4]]), np.ones((2, 1)))
        writer.end_step()
    writer.close()
    rows = read_rows(TraceReader(tmp_path / "t.trace"), 8)
    assert rows.ids == [7, 3] and rows.experts_TLK[:, 0, 0].tolist() == list(range(8))
    assert rows.split(0.5)[1].ids == [3]


def test_the_command_prints_tables_json_and_a_verdict(capsys) -> None:
    arguments = ["analyze", str(TRACE), "--tokens", "800", "--curve-tokens", "100"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "belady-bypass" in text and "candidate for running from disk" in text
    assert main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    hits = facts["hit_curves"]["hit_ratio"]
    for name, values in hits.items():
        assert all(a <= b for a, b in zip(values, hits["belady-bypass"], strict=True)), name
    assert len(facts["load"]["use_ratio_per_layer"]) == 24 and facts["tokens"] == 800


def test_the_report_is_complete_and_needs_nothing_from_elsewhere(capsys, tmp_path) -> None:
    folder = tmp_path / "report"
    assert main(["analyze", str(TRACE), "--tokens", "600", "--curve-tokens", "60", "--report", str(folder)]) == 0
    assert str(folder / "index.html") in capsys.readouterr().out.replace("\n", "")
    page = (folder / "index.html").read_text()
    images = re.findall(r'src="([^"]+)"', page)
    assert len(images) == 7 and "http" not in page
    for image in images:
        data = (folder / image).read_bytes()
        assert data.startswith(b"\x89PNG") and 5_000 < len(data) < 200_000
    assert json.loads((folder / "analysis.json").read_text())["verdict"][0] in page


def test_one_short_sequence_and_an_empty_trace(tmp_path, capsys) -> None:
    path = tmp_path / "t.trace"
    import_arrays(path, np.array([[[1]], [[2]]], np.uint8), np.array([0, 2]), num_experts=4)
    _, facts = analyze(TraceReader(path), None, 10)
    assert facts["stability"]["autocorrelation"] is None and facts["verdict"]
    import_arrays(path, np.zeros((0, 1, 1), np.uint8), np.array([0]), num_experts=4)
    assert main(["analyze", str(path)]) == 2
    assert "no tokens" in capsys.readouterr().err
    assert main(["simulate", str(path), "--slots", "2", "--expert-bytes", "1MB"]) == 2
    assert "no tokens" in capsys.readouterr().err


def test_only_the_report_needs_matplotlib() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from tidegate.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "analyze", str(TRACE), "--tokens", "100", "--curve-tokens", "10"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    done = subprocess.run([*command, "--report", "/tmp/never"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "tidegate[plot]" in done.stderr
