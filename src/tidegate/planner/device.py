"""A model on a machine with a CUDA device, on paper: which bytes would lie in the device's memory, which in the host's, which on
disk, and how fast that would be. Tidegate computes on the processor only; this is for choosing a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tidegate.engine.needs import PackedModel, Sizes
from tidegate.plan import Needs, Plan, spread
from tidegate.planner.costs import Cost, Overhead
from tidegate.planner.forecast import Forecast, make_forecast
from tidegate.planner.machine import TOKENS, DiskRate, Machine
from tidegate.planner.routing import HitRates, expected_hits

NOTE = "for another machine: Tidegate has no CUDA backend, its run computes on the processor"
# Assumed: a CUDA context with its kernels; launches of a layer's kernels; a copy's start; PCIe 4.0 x16; arithmetic in
# proportion to memory, as on current devices.
DEVICE_RUNTIME_BYTES, RESERVE_RATIO = 512 << 20, 0.02
LAYER_S, COPY_S, LINK_BYTES_PER_S, VRAM_BYTES_PER_S, MACS_PER_BYTE = 60e-6, 20e-6, 25e9, 900e9, 80.0
KERNEL_EFFICIENCY = 0.8


@dataclass(frozen=True)
class DeviceRates:
    """``source``: given, measured (``tidegate hardware``) or assumed."""

    vram_bytes_per_s: float
    link_bytes_per_s: float
    macs_per_s: float
    source: str


@dataclass(frozen=True)
class DevicePlan:
    """Bytes by owner in each tier. ``slots``: experts a layer in VRAM, the hottest; ``ram_slots``: those that follow, in RAM; the
    others stay on disk. ``shortfall_bytes`` of VRAM are missing where ``forecast`` is None."""

    vram_bytes: int
    vram: Mapping[str, int]
    ram: Mapping[str, int]
    disk: Mapping[str, int]
    slots: tuple[int, ...]
    ram_slots: tuple[int, ...]
    shortfall_bytes: int
    rates: DeviceRates
    forecast: Forecast | None
    binding: str

    def to_json(self) -> dict[str, Any]:
        return {
            "note": NOTE,
            "vram_bytes": self.vram_bytes,
            "tiers_bytes": {"vram": dict(self.vram), "ram": dict(self.ram), "disk": dict(self.disk)},
            "slots_per_layer": {"vram": list(self.slots), "ram": list(self.ram_slots)},
            "shortfall_bytes": self.shortfall_bytes,
            "rates": vars(self.rates),
            "forecast": self.forecast.to_json() | {"binding": self.binding} if self.forecast else None,
        }


def device_rates(machine: Machine, vram_bytes_per_s: int | None, link_bytes_per_s: int | None) -> DeviceRates:
    """What is given, else what was measured here, else assumed."""
    cuda = machine.cuda
    memory = vram_bytes_per_s or (cuda.memory_bytes_per_s if cuda else VRAM_BYTES_PER_S)
    link = link_bytes_per_s or (cuda.to_device_bytes_per_s if cuda else LINK_BYTES_PER_S)
    macs = max(cuda.macs_per_s.values()) if cuda and not vram_bytes_per_s else MACS_PER_BYTE * memory
    given = "given" if vram_bytes_per_s and link_bytes_per_s else None
    return DeviceRates(memory, link, macs, given or (f"measured on {cuda.name}" if cuda else "assumed"))


def make_device_plan(
    model: PackedModel,
    needs: Needs,
    sizes: Sizes,
    machine: Machine,
    rates: DeviceRates,
    *,
    vram_bytes: int,
    ram_bytes: int,
    prompt_tokens: int,
) -> DevicePlan:
    """VRAM: dense weights, KV cache and activations first, then experts; RAM: the runtime, then experts."""
    fixed = {
        "device runtime": DEVICE_RUNTIME_BYTES,
        "dense weights": needs.dense_bytes,
        "KV cache": needs.kv_bytes,
        "workspace": needs.workspace_bytes,
    }
    usable = vram_bytes - int(vram_bytes * RESERVE_RATIO)
    room = usable - sum(fixed.values())
    least = needs.num_layers * needs.min_slots * needs.slot_bytes
    shortfall = max(0, least - room)
    slots = spread(max(0, room) // needs.slot_bytes, needs) if needs.num_layers and not shortfall else ()
    in_vram = sum(slots) * needs.slot_bytes
    vram = fixed | {"expert slots": in_vram, "free": max(0, vram_bytes - sum(fixed.values()) - in_vram)}
    runtime = needs.runtime_bytes + needs.growth_bytes
    in_either = spread(sum(slots) + max(0, ram_bytes - runtime) // needs.slot_bytes, needs) if slots else ()
    ram_slots = tuple(both - hot for both, hot in zip(in_either, slots, strict=True))
    in_ram = sum(ram_slots) * needs.slot_bytes
    everything = needs.num_layers * needs.num_experts * needs.slot_bytes
    disk = {"experts": max(0, everything - in_vram - in_ram)}
    forecast, binding = None, ""
    if not shortfall:
        forecast, binding = _forecast(model, needs, sizes, machine, rates, slots, ram_slots, prompt_tokens)
    ram = {"runtime": runtime, "experts": in_ram}
    return DevicePlan(vram_bytes, vram, ram, disk, slots, ram_slots, shortfall, rates, forecast, binding)


def _forecast(
    model: PackedModel,
    needs: Needs,
    sizes: Sizes,
    machine: Machine,
    rates: DeviceRates,
    slots: tuple[int, ...],
    ram_slots: tuple[int, ...],
    prompt_tokens: int,
) -> tuple[Forecast, str]:
    """The same clock as the processor's: the device's memory for memory, and for the disk the link, before which experts that
    RAM does not hold come from disk."""
    family, total = model.config.family, max(1, needs.num_layers * needs.num_experts)
    plan = Plan(needs.budget_for(sum(slots)), needs, slots)
    hits = expected_hits(family, plan.resident_ratio)
    either = expected_hits(family, min(1.0, (sum(slots) + sum(ram_slots)) / total))
    blob = max(1, needs.slot_bytes)
    from_disk = min(1.0, (1 - either.expected) / (1 - hits.expected)) if hits.expected < 1 else 0.0
    disk_s, link_s = from_disk * blob / machine.disk_bytes_per_s(blob), blob / rates.link_bytes_per_s
    rate = blob / (disk_s + link_s)
    latency_s = COPY_S + link_s + from_disk * machine.load_s(blob)
    device = replace(
        machine,
        memory={machine.threads: rates.vram_bytes_per_s},
        dense=_kernels(rates),
        experts=_kernels(rates),
        disk=(DiskRate(blob, latency_s, latency_s - COPY_S, rate, rate),),
        cache_bytes=0,
        overhead=Overhead(0.0, Cost(LAYER_S)),
        row_overhead=Overhead(0.0, Cost(0.0)),
        beside_loads_ratio=1.0,
        is_measured=rates.source != "assumed",
    )
    named = HitRates(
        hits.expected, hits.low, hits.high, f"in VRAM; {either.expected:.0%} in VRAM or RAM; {hits.source}"
    )
    found = make_forecast(
        model, plan, sizes, device, named, threads=machine.threads, prompt_tokens=prompt_tokens, prefetch=False
    )
    slow = "disk" if disk_s > link_s else "link"
    return found, {"disk": slow, "memory bandwidth": "VRAM bandwidth"}.get(found.step.binding, found.step.binding)


def _kernels(rates: DeviceRates) -> dict[str, dict[int, float]]:
    bits = {"int4-g32-m8": 4.25, "int4-g32": 4.5, "mxfp4-g32": 4.5, "int8-g32": 8.5, "bf16": 16.0, "f32": 32.0}
    reads = KERNEL_EFFICIENCY * rates.vram_bytes_per_s
    return {
        fmt: {count: min(reads, rates.macs_per_s * size / 8 / count) for count in TOKENS} for fmt, size in bits.items()
    }
