"""Rates of a machine: measured for real, kept, found again, scaled; and who else is computing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tidegate.cli import hardware as command_module
from tidegate.cli import main
from tidegate.planner import machine as machine_module
from tidegate.planner import measure, measure_disk, measure_kernels
from tidegate.planner.costs import Cost, Overhead, middle
from tidegate.planner.machine import (
    TOKENS,
    DiskRate,
    Machine,
    assumed_machine,
    file_system,
    fingerprint,
    keep_machine,
    load_machine,
)
from tidegate.quant.formats import Format


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same measurement with less memory and a smaller file."""
    monkeypatch.setattr(measure, "MEMORY_BYTES", 40 << 20)
    monkeypatch.setattr(measure_kernels, "LARGE", replace(measure_kernels.LARGE, matrix_bytes=1 << 20))
    monkeypatch.setattr(measure_kernels, "CACHED_ROUNDS", 20)
    monkeypatch.setattr(measure, "PROCESSES", 1)
    monkeypatch.setattr(measure_kernels, "MEASURED_MACS", 1 << 28)
    monkeypatch.setattr(measure_disk, "FILE_BYTES", 16 << 20)
    monkeypatch.setattr(measure_disk, "READ_BYTES", 16 << 20)


def test_a_measurement_is_whole_and_leaves_nothing_behind(small: None, tmp_path: Path) -> None:
    found = measure.measure_machine(tmp_path, 2)
    assert found.fingerprint == fingerprint() and set(found.memory) == {1, 2}
    kinds = (found.dense, found.experts, found.cached_dense, found.cached_experts)
    rates = [found.memory, *(rate for kind in kinds for rate in kind.values())]
    assert min(min(one.values()) for one in rates) > 1e5 and set(found.isas) >= {"portable"}
    assert all(tuple(one) == TOKENS for one in rates[1:])
    sizes = [disk.block_bytes for disk in found.disk]
    assert sizes == sorted(sizes) and sizes[0] < 1 << 17 and 4 << 20 < sizes[-1] <= 10 << 20, "what fits the memory"
    assert all(0 < disk.read_s <= disk.latency_s for disk in found.disk)
    assert all(0 < disk.beside_bytes_per_s <= disk.bytes_per_s for disk in found.disk)
    assert found.keeps_in_cache(1 << 20) == (found.cache_bytes > 0) and not found.keeps_in_cache(found.cache_bytes + 1)
    book = asdict(found.bookkeeping)
    costs = [*book.pop("gate").values(), *book.pop("access").values(), *book.values()]
    assert all(0 <= seconds < 0.1 for seconds in costs) and found.bookkeeping.wake_s > 0
    assert 0 < found.beside_loads_ratio <= 1
    assert (
        0 < found.overhead.of(1, 1) < found.overhead.of(16, 8) < 1
        and 0 <= found.row_overhead.of(16, 8) < 1
        and found.drift_ratio >= 0
        and 20 << 20 < found.runtime_bytes < 200 << 20
        and 0 <= found.busy_ratio <= 1
    )
    assert not list(tmp_path.glob(".tidegate*"))
    assert Machine.from_json(json.loads(json.dumps(found.to_json()))) == found


def overhead(layer_s: float) -> Overhead:
    return Overhead(1e-6, Cost(layer_s, 1e-6))


def test_costs_are_lines_without_negative_parts() -> None:
    line = Cost.through((2, 5.0), (8, 17.0))
    assert line == Cost(1.0, 2.0) and line.of(3) == 7.0
    assert Cost.through((2, 5.0), (8, 4.0)) == Cost(5.0, 0.0), "more cannot take less"
    assert Cost.through((2, 1.0), (4, 10.0)) == Cost(0.0, 4.5)
    assert Overhead(1.0, line).of(4, 8) == 1.0 + 4 * 17.0


def test_the_middle_of_measurements_is_that_of_each_number() -> None:
    found = [{"a": 1.0, "b": [{"c": n}], "name": str(n), "is_measured": True, "cuda": None} for n in (3, 1, 2)]
    assert middle(found) == {"a": 1.0, "b": [{"c": 2}], "name": "3", "is_measured": True, "cuda": None}
    machine = assumed_machine(2)
    assert Machine.from_json(middle([machine.to_json()] * 3)) == machine


def test_a_model_in_the_cache_is_read_at_its_rates() -> None:
    machine = replace(
        assumed_machine(2),
        cache_bytes=32 << 20,
        cached_dense={"int8-g32": {1: 5e11}},
        cached_experts={"int4-g32": {1: 4e11}},
    )
    assert machine.keeps_in_cache(20 << 20) and not machine.keeps_in_cache(32 << 20)
    assert machine.decode_bytes_per_s(Format("int8", 32), cached=True) == pytest.approx(5e11)
    assert machine.decode_bytes_per_s(Format("int4", 32), experts=True, cached=True) == pytest.approx(4e11)
    assert machine.decode_bytes_per_s(Format("int8", 32)) == assumed_machine(2).decode_bytes_per_s(Format("int8", 32))


def test_kept_for_this_machine_and_disk_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = replace(assumed_machine(2), fingerprint=fingerprint(), overhead=overhead(7e-6), is_measured=True)
    assert not load_machine(tmp_path).is_measured
    keep_machine(mine, tmp_path)
    assert load_machine(tmp_path / "not there yet") == mine
    assert load_machine("/proc") == mine, "another disk of this machine: better than nothing"
    keep_machine(replace(mine, overhead=overhead(8e-6)), "/proc")
    assert file_system("/proc") != file_system(tmp_path)
    assert (load_machine("/proc").overhead, load_machine(tmp_path).overhead) == (overhead(8e-6), overhead(7e-6))
    monkeypatch.setattr(machine_module, "fingerprint", lambda: "another machine")
    assert not load_machine(tmp_path).is_measured


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}'])
def test_a_broken_file_is_as_good_as_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cache" / "hardware.json"
    file.parent.mkdir()
    file.write_text(text)
    assert not load_machine(tmp_path).is_measured
    keep_machine(replace(assumed_machine(1), fingerprint=fingerprint()), tmp_path)
    assert load_machine(tmp_path).fingerprint == fingerprint()


def test_disk_rates_between_and_beyond_what_was_measured() -> None:
    disk = (DiskRate(1 << 16, 1e-4, 8e-5, 1e9, 0.5e9), DiskRate(1 << 20, 1e-3, 9e-4, 2e9, 1e9))
    machine = replace(assumed_machine(2), disk=disk)
    assert machine.load_s(1 << 16) == pytest.approx(1e-4) and machine.load_s(1 << 20) == pytest.approx(1e-3)
    assert 1e-4 < machine.load_s(1 << 18) < 1e-3 < machine.load_s(1 << 22) == pytest.approx(4e-3)
    assert machine.disk_bytes_per_s(1 << 20) == pytest.approx(2e9) == machine.disk_bytes_per_s(1 << 25)
    assert 1e9 < machine.disk_bytes_per_s(1 << 18) < 2e9
    assert machine.disk_bytes_per_s(1 << 15) == pytest.approx(0.5e9), "a smaller block takes as long as the smallest"
    assert machine.beside_bytes_per_s(1 << 20) == pytest.approx(1e9)
    assert machine.first_read_s(1 << 16) == pytest.approx(8e-5 - (1 << 16) / 1e9)
    assert machine.first_read_s(1 << 20) == pytest.approx(9e-4 - (1 << 20) / 2e9)
    assert machine.first_read_s(1 << 15) == pytest.approx(machine.first_read_s(1 << 16))
    twice = machine.with_rates(None, int(4e9))
    assert twice.load_s(1 << 20) == pytest.approx(5e-4) and twice.disk_bytes_per_s(1 << 20) == pytest.approx(4e9)


def test_kernel_rates_between_and_beyond_what_was_measured() -> None:
    rates = {"int4-g32": {1: 8.0, 4: 4.0, 256: 0.5}, "bf16": {1: 16.0, 256: 1.0}, "f32": {1: 32.0, 256: 2.0}}
    machine = replace(assumed_machine(2), dense=rates)
    assert machine.decode_bytes_per_s(Format("int4", 64, True)) == 8.0, "the nearest kind"
    assert machine.decode_bytes_per_s(None) == 32.0
    both = replace(machine, dense={**rates, "int4-g32-m8": {1: 9.0}})
    found = [both.decode_bytes_per_s(Format.parse(name)) for name in ("int4-g64", "int4-g32-m8", "int4-g64-m8")]
    assert found == [8.0, 9.0, 9.0], "the same kind of scales"
    assert machine.decode_bytes_per_s(Format.parse("int4-g32-m8")) == 8.0
    times = [1 / machine.decode_bytes_per_s(Format("int4", 32), tokens=count) for count in (0.5, 1, 2.5, 4, 256, 512)]
    assert times == pytest.approx([1 / 8, 1 / 8, 3 / 16, 1 / 4, 2, 4])
    assert machine.prefill_macs_per_s(None) == pytest.approx(2.0 * 256 / 4)
    twice = machine.with_rates(int(2 * machine.memory_bytes_per_s(2)), None)
    assert twice.decode_bytes_per_s(Format("bf16")) == pytest.approx(32.0)
    assert twice.decode_bytes_per_s(Format("bf16"), tokens=256) == 1.0, "arithmetic takes as long as before"
    slow = machine.with_rates(int(machine.memory_bytes_per_s(2) / 100), None)
    assert slow.decode_bytes_per_s(None, tokens=256) == pytest.approx(0.32)
    assert machine.with_rates(None, None) == machine


def test_work_of_others_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            others = measure.OtherWork()
            time.sleep(1.0)
            ratio = others.ratio()
        finally:
            spinning.kill()
    assert ratio > 0.1 / os.cpu_count()


def test_a_result_that_could_not_be_kept_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(command_module, "measure_machine", lambda path, threads: pytest.fail("was measured"))
    assert main(["hardware", str(tmp_path)]) == 2
    assert "set TIDEGATE_CACHE" in capsys.readouterr().err


def test_a_busy_machine_is_measured_again_and_its_result_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = iter([0.5, 0.3, 0.4, 0.2, 0.0])
    base = replace(assumed_machine(2), fingerprint=fingerprint(), isas={"portable": 1e9})
    monkeypatch.setattr(command_module, "measure_machine", lambda path, threads: replace(base, busy_ratio=next(busy)))
    assert main(["hardware", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "others used 30% of the processors" in shown.out, "the least busy one is shown"
    assert shown.err.count("measuring again") == 2 and "not kept" in shown.err
    assert not load_machine(tmp_path).fingerprint
    assert main(["hardware", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["busy_ratio"] == 0.0
    assert load_machine(tmp_path).fingerprint == fingerprint()
