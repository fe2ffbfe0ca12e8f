"""The forecast's clock: its parts on a machine of round numbers, and what must hold whatever the rates are."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from published import MODELS
from tidegate.checkpoint.convert import ConvertOptions
from tidegate.config import EngineOptions, parse_options
from tidegate.engine.needs import needs_of, sizes_of
from tidegate.plan import Plan
from tidegate.planner.card import expected_process
from tidegate.planner.costs import Cost, Overhead
from tidegate.planner.headers import ModelHeaders, read_headers
from tidegate.planner.machine import DiskRate, Machine, assumed_machine
from tidegate.planner.step_clock import StepClock, _chunks, expected_union


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> ModelHeaders:
    folder = tmp_path_factory.mktemp("forecast")
    (folder / "config.json").write_text(json.dumps(MODELS["OLMoE-1B-7B"].config))
    return read_headers(str(folder), ConvertOptions("int4", "int8"))


def machine_of(load_s: float = 1e-3, disk: float = 4e9, beside: float = 4e9, kernels_beside: float = 1.0) -> Machine:
    """A byte of weights takes 0.1 ns however many tokens it serves; layers cost nothing beside them."""
    rates = {name: {1: 1e10, 256: 1e10} for name in ("int4-g32", "int8-g32", "f32")}
    nothing = Overhead(0.0, Cost(0.0))
    disk_rates = (DiskRate(1 << 20, load_s, load_s, disk, beside), DiskRate(1 << 26, load_s, load_s, disk, beside))
    return replace(
        assumed_machine(2), memory={1: 1e12, 2: 1e12}, dense=rates, experts=rates, overhead=nothing, row_overhead=nothing,
        disk=disk_rates, beside_loads_ratio=kernels_beside,
    )  # fmt: skip


def clock_of(
    headers: ModelHeaders, machine: Machine, slots: int, prefetch: bool = False, **options: object
) -> StepClock:
    parsed = parse_options(EngineOptions, {"context": 512, **options})
    needs = needs_of(headers, parsed, expected_process(machine, headers.config.vocab_size), 2)
    plan = Plan(1 << 40, needs, (slots,) * needs.num_layers)
    return StepClock(headers, plan, sizes_of(headers.config, parsed), machine, 2, prefetch)


def test_the_parts_of_a_step_on_round_numbers(olmoe: ModelHeaders) -> None:
    blob, layers = olmoe.layouts[0].blob_bytes, olmoe.config.num_layers
    expert_s = blob / 1e10
    here = clock_of(olmoe, machine_of(), 64).decode(1.0, None)
    assert here.wait_s == pytest.approx(0) and here.experts_s == pytest.approx(layers * 8 * expert_s)
    read = sum(entry.nbytes for entry in olmoe.dense.values() if entry.name != "embed")
    assert here.weights_s == pytest.approx(read / 1e10)
    missing = clock_of(olmoe, machine_of(), 16).decode(0.0, None)
    loads_s = 1e-3 + 7 * blob / 4e9  # all computation but the last expert's fits beside it
    assert missing.experts_s + missing.wait_s == pytest.approx(layers * (loads_s + expert_s))


def test_loads_and_computation_slow_each_other(olmoe: ModelHeaders) -> None:
    alone, beside = machine_of(), machine_of(beside=2e9, kernels_beside=0.5)
    blob, layers = olmoe.layouts[0].blob_bytes, olmoe.config.num_layers
    slowed = clock_of(olmoe, beside, 16).decode(0.0, None)
    both_s = 7 * blob / 1e10 / 0.5
    loads_s = both_s + (1e-3 + 7 * blob / 4e9 - both_s / 2)
    assert slowed.experts_s + slowed.wait_s == pytest.approx(layers * (loads_s + blob / 1e10))
    assert slowed.total_s > clock_of(olmoe, alone, 16).decode(0.0, None).total_s
    assert clock_of(olmoe, beside, 64).decode(1.0, None) == clock_of(olmoe, alone, 64).decode(1.0, None)


def test_more_experts_than_slots_wait_for_slots(olmoe: ModelHeaders) -> None:
    """Those that are here are computed before any load starts."""
    times = {}
    for slots in (16, 64):
        found = clock_of(olmoe, machine_of(disk=5e8, beside=5e8), slots, sequences=8).decode(0.5, 40.0)
        times[slots] = found.experts_s + found.wait_s
    hidden_s = olmoe.config.num_layers * 20 * olmoe.layouts[0].blob_bytes / 1e10
    assert times[16] == pytest.approx(times[64] + hidden_s)


@settings(max_examples=40, deadline=None)
@given(
    rate=st.floats(0, 1), better=st.floats(0, 1), slots=st.integers(8, 64), sequences=st.sampled_from([1, 3, 16]),
    beside=st.floats(0.2, 1), prefetch=st.booleans(),
)  # fmt: skip
def test_more_hits_are_never_slower(olmoe, rate, better, slots, sequences, beside, prefetch) -> None:  # type: ignore[no-untyped-def]
    low, high = sorted((rate, better))
    machine = machine_of(beside=beside * 4e9, kernels_beside=beside)
    clock = clock_of(olmoe, machine, slots, prefetch, sequences=sequences)
    slow, fast = clock.decode(low, None), clock.decode(high, None)
    assert fast.total_s <= slow.total_s * (1 + 1e-9) or fast.total_s - slow.total_s < 1e-4 * slow.total_s
    assert min(vars(fast).values()) >= -1e-12


def test_prompts_that_start_together_share_their_loads(olmoe: ModelHeaders) -> None:
    one_s, first_s = clock_of(olmoe, machine_of(), 64, prefill_chunk=64).prompts(64)
    assert one_s == first_s
    four_s, first_of_four_s = clock_of(olmoe, machine_of(), 64, sequences=4, prefill_chunk=64).prompts(64)
    assert first_of_four_s == pytest.approx(one_s) and four_s < 2.5 * one_s
    scarce_s, _ = clock_of(olmoe, machine_of(), 8, sequences=4, prefill_chunk=64).prompts(64)
    assert scarce_s > 3 * one_s
    whole_s, _ = clock_of(olmoe, machine_of(), 8, sequences=4, prefill_chunk=256).prompts(64)
    assert whole_s < scarce_s / 2, "one chunk loads every expert once"


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 300))
def test_chunks_are_dealt_in_order(tokens: int, sequences: int, most: int) -> None:
    chunks = list(_chunks(tokens, sequences, most))
    sizes = [sum(count for count, _ in chunk) for chunk in chunks]
    assert sum(sizes) == tokens * sequences and all(size == most for size in sizes[:-1]) and 0 < sizes[-1] <= most
    assert sum(stop == tokens for chunk in chunks for _, stop in chunk) == sequences


def test_many_sequences_take_no_time_to_forecast(olmoe: ModelHeaders) -> None:
    clock = clock_of(olmoe, machine_of(), 32, sequences=4096)
    assert clock.decode(0.5, None).total_s > 0 and clock.prompts(128)[0] > 0
    assert expected_union(64, 8, 4096) == pytest.approx(64)
