"""A CUDA device on paper: which bytes lie where, what that is worth; and its probe, on a torch that only pretends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from published import MODELS
from tidegate.backends.cuda import probe
from tidegate.checkpoint.convert import ConvertOptions
from tidegate.cli import hardware as hardware_command
from tidegate.cli import main
from tidegate.cli.plan_text import device_lines
from tidegate.config import EngineOptions, parse_options
from tidegate.memory.budget import Budget
from tidegate.planner.card import Card, make_card, with_device
from tidegate.planner.device import DevicePlan
from tidegate.planner.headers import read_headers
from tidegate.planner.machine import Machine, assumed_machine, fingerprint, load_machine

GIB = 1 << 30


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Card:
    folder = tmp_path_factory.mktemp("device")
    (folder / "config.json").write_text(json.dumps(MODELS["Qwen3-30B-A3B"].config))
    headers = read_headers(str(folder), ConvertOptions())
    return make_card(
        headers, parse_options(EngineOptions, {"context": 4096}), Budget(8 * GIB, ""), assumed_machine(2), 2
    )


def device_of(card: Card, vram: int, *rates: int | None, machine: Machine | None = None) -> DevicePlan:
    found = with_device(card, machine or assumed_machine(2), vram, *(rates or (None, None)), None).device
    assert found is not None
    return found


@pytest.mark.parametrize("vram", [4 * GIB, 8 * GIB, 12 * GIB, 24 * GIB])
def test_every_byte_lies_somewhere_once(card: Card, vram: int) -> None:
    found, needs = device_of(card, vram), card.needs
    assert sum(found.vram.values()) == vram and found.vram["free"] >= vram // 50
    assert found.vram["dense weights"] == needs.dense_bytes and found.vram["KV cache"] == needs.kv_bytes
    experts = found.vram["expert slots"] + found.ram["experts"] + found.disk["experts"]
    assert experts == needs.num_layers * needs.num_experts * needs.slot_bytes
    assert sum(found.ram.values()) <= card.budget.limit_bytes
    each = [one + other for one, other in zip(found.slots, found.ram_slots, strict=True)]
    assert max(each) <= needs.num_experts and min(found.slots) >= needs.min_slots
    assert found.forecast is not None and found.shortfall_bytes == 0


def test_more_and_faster_memory_is_never_slower(card: Card) -> None:
    speeds = []
    for vram in (4 * GIB, 8 * GIB, 16 * GIB, 24 * GIB):
        forecast = device_of(card, vram).forecast
        assert forecast is not None
        speeds.append(forecast.decode_tokens_per_s)
    assert speeds == sorted(speeds) and speeds[-1] > 1.5 * speeds[0]
    usual, link, memory = (device_of(card, 8 * GIB, *r) for r in ((None, None), (None, int(60e9)), (int(3e12), None)))
    assert usual.forecast and link.forecast and memory.forecast and usual.binding in ("link", "disk")
    assert link.forecast.decode_tokens_per_s > usual.forecast.decode_tokens_per_s
    assert memory.forecast.decode_tokens_per_s > usual.forecast.decode_tokens_per_s


def test_too_little_says_how_much_is_missing_and_that_it_is_on_paper(card: Card) -> None:
    found = device_of(card, 2 * GIB)
    assert found.forecast is None and found.shortfall_bytes > 0
    assert device_of(card, 2 * GIB + int(1.03 * found.shortfall_bytes)).forecast is not None
    text = "\n".join(device_lines(found))
    assert "no CUDA backend" in text and "are missing" in text
    assert "no CUDA backend" in device_of(card, 24 * GIB).to_json()["note"]


def test_the_command_shows_the_tiers(card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", card.headers.path, "--ram", "8GiB", "--context", "512", "--vram", "12GiB"]
    assert main([*asked, "--vram-bandwidth", "1000GB/s", "--link-bandwidth", "20GB/s"]) == 0
    text = capsys.readouterr().out
    assert "with 12.0 GiB of VRAM" in text and "1000 GB/s of VRAM, 20 GB/s of link, given" in text
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["device"]
    assert found["rates"]["source"] == "assumed" and sum(found["tiers_bytes"]["vram"].values()) == 12 * GIB


class _Event:
    """Every measured operation takes two milliseconds."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, stop: _Event) -> float:
        return 2.0


class _Tensor:
    def __init__(self, places: list[Any], device: Any) -> None:
        self._places, self.device = places, device

    def copy_(self, other: _Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self._places.append((other.device, self.device))


def fake_torch(places: list[Any]) -> Any:
    def tensor(*_: Any, device: Any = "pinned", **options: Any) -> _Tensor:
        assert device != "pinned" or options["pin_memory"]
        return _Tensor(places, device)

    cuda = SimpleNamespace(
        mem_get_info=lambda device: (20 * GIB, 24 * GIB), Event=_Event, get_device_name=lambda device: "Pretender 24"
    )
    return SimpleNamespace(
        cuda=cuda, device=lambda kind, index: kind, empty=tensor, ones=tensor, empty_like=lambda one: one,
        matmul=lambda one, other, out: out, uint8="u8", float32="f32", float16="f16", bfloat16="bf16",
    )  # fmt: skip


def test_the_probe_measures_both_ways_from_pinned_memory() -> None:
    places: list[Any] = []
    found = probe.measure_cuda(fake_torch(places))
    assert set(places) == {("pinned", "cuda"), ("cuda", "pinned"), ("cuda", "cuda")}
    assert found.to_device_bytes_per_s == found.from_device_bytes_per_s == pytest.approx(probe.COPY_BYTES / 2e-3)
    assert found.memory_bytes_per_s == pytest.approx(2 * probe.COPY_BYTES / 2e-3)
    assert set(found.macs_per_s) == {"float32", "float16", "bfloat16"} and found.free_bytes == 20 * GIB


def test_hardware_keeps_the_device_and_plans_use_it(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "cache"))
    base = replace(assumed_machine(2), fingerprint=fingerprint(), isas={"portable": 1e9})
    monkeypatch.setattr(hardware_command, "measure_machine", lambda path, threads: base)
    monkeypatch.setattr(hardware_command, "torch_with_cuda", lambda: (None, "there is no CUDA driver"))
    assert main(["hardware", str(tmp_path)]) == 0
    assert "CUDA: not measured, there is no CUDA driver" in capsys.readouterr().err
    assert load_machine(tmp_path).cuda is None
    monkeypatch.setattr(hardware_command, "torch_with_cuda", lambda: (fake_torch([]), ""))
    assert main(["hardware", str(tmp_path)]) == 0
    assert "Pretender 24: 20.0 GiB of 24.0 GiB free" in capsys.readouterr().out
    machine = load_machine(tmp_path)
    assert machine.cuda is not None and machine.cuda.name == "Pretender 24"
    assert device_of(card, 12 * GIB, machine=machine).rates.source == "measured on Pretender 24"
