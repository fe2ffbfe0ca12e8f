"""``tidegate simulate``: what a memory size, policy, predictor, staging depth, width or batch would do, without the model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice, product
from pathlib import Path
from typing import Annotated, Any

import typer

from tidegate.errors import BudgetTooSmall, UsageError
from tidegate.experts.policy import DEFAULT_POLICY, policy_factory
from tidegate.experts.predictor import Predictor
from tidegate.experts.predictor_file import find_predictor
from tidegate.experts.trace import TraceMeta, TraceReader
from tidegate.plan import Needs, make_plan
from tidegate.planner.machine import Machine, load_machine
from tidegate.quant.formats import Format
from tidegate.sim.batching import batched
from tidegate.sim.oracle import Oracle
from tidegate.sim.replay import Step, whole_steps
from tidegate.sim.simulate import Profile
from tidegate.sim.sweep import SCALE_BITS, Configuration, Result, Sweep, pareto, run_flags
from tidegate.units import format_bytes, parse_bytes

_MACHINE, _GRID = "Machine and model", "What to try; several values, separated by commas, make a grid"


def command(
    trace: Annotated[Path, typer.Argument(help="A trace of tidegate trace or run --trace.")],
    memory: Annotated[
        str | None, typer.Option(metavar="BYTES", rich_help_panel=_GRID, help="Budgets, like 2GiB,4GiB.")
    ] = None,
    slots: Annotated[str | None, typer.Option(rich_help_panel=_GRID, help="Slots a layer, instead of budgets.")] = None,
    policy: Annotated[str, typer.Option(rich_help_panel=_GRID, help="Who is evicted.")] = DEFAULT_POLICY,
    predictor: Annotated[
        str, typer.Option(rich_help_panel=_GRID, help="none, last-token, window, decayed, oracle, or fitted files.")
    ] = "none",
    staging: Annotated[
        str, typer.Option(rich_help_panel=_GRID, help="Layers in work at once: 1 no prefetch, 2 the next layer, ...")
    ] = "2",
    threshold: Annotated[str, typer.Option(rich_help_panel=_GRID, help="Prefetch above this probability.")] = "0.5",
    bits: Annotated[str | None, typer.Option(rich_help_panel=_GRID, help="Expert widths, like 3,4,8.")] = None,
    batch: Annotated[
        str, typer.Option(rich_help_panel=_GRID, help="Sequences decoded side by side; 0: the steps as recorded.")
    ] = "0",
    tokens: Annotated[int, typer.Option(min=1, help="Stop after this many steps of the trace.")] = 4000,
    most: Annotated[int, typer.Option(min=1, help="Speculative loads a layer at most.")] = 4,
    no_share: Annotated[bool, typer.Option("--no-share", help="Slots do not move between layers.")] = False,
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", rich_help_panel=_MACHINE, help="Disk reads a second; default: tidegate hardware's."
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", rich_help_panel=_MACHINE, help="Memory reads a second; default: tidegate hardware's."
        ),
    ] = None,
    dense_us: Annotated[
        float, typer.Option(rich_help_panel=_MACHINE, help="A layer without its routed experts.")
    ] = 300.0,
    token_us: Annotated[float, typer.Option(rich_help_panel=_MACHINE, help="Embedding, logits and sampling.")] = 1000.0,
    predict_us: Annotated[float, typer.Option(rich_help_panel=_MACHINE, help="One call of the predictor.")] = 20.0,
    expert_size: Annotated[
        str | None,
        typer.Option(
            "--expert-bytes", metavar="BYTES", rich_help_panel=_MACHINE, help="One expert; default: the trace's."
        ),
    ] = None,
    fixed: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", rich_help_panel=_MACHINE, help="All memory but expert slots; default: the trace's."
        ),
    ] = None,
    recorded_bits: Annotated[int, typer.Option(rich_help_panel=_MACHINE, help="Bits that an expert's size is of.")] = 4,
    sweep: Annotated[bool, typer.Option("--sweep", help="Show only the best of the grid, with their flags.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Runs the engine's own cache, policies and predictors against a clock and one I/O channel. Caches start empty."""
    reader = TraceReader(trace)
    meta = reader.meta
    expert_bytes = parse_bytes(expert_size, "--expert-bytes") if expert_size else meta.expert_bytes
    if not expert_bytes:
        raise UsageError(f"{trace} does not say how large an expert is; add --expert-bytes")
    rates = {name: parse_bytes(text, f"--{name}") if text else None for name, text in (("ram", ram), ("disk", disk))}
    machine = load_machine(trace).with_rates(rates["ram"], rates["disk"])
    profile = _profile(machine, expert_bytes, recorded_bits, dense_us, token_us, predict_us)
    fixed_bytes = parse_bytes(fixed, "--fixed") if fixed else meta.fixed_bytes
    grid = list(
        _configurations(
            _places(memory, slots), policy, predictor, staging, threshold, bits or str(recorded_bits), batch, meta,
            expert_bytes, fixed_bytes, recorded_bits,
        )
    )  # fmt: skip
    run = _sweep(reader, tokens, profile, recorded_bits, most, share=not no_share)
    results = [run.run(config) for config in grid]
    _show(results, pareto(results) if sweep else results, sweep, as_json)
    return 0


def _profile(
    machine: Machine, expert_bytes: int, recorded_bits: int, dense_us: float, token_us: float, predict_us: float
) -> Profile:
    bandwidth = machine.disk_bytes_per_s(expert_bytes)
    kind = "int4-g32" if recorded_bits <= 4 else "int8-g32"
    return Profile(
        expert_bytes, bandwidth, expert_bytes / machine.decode_bytes_per_s(Format.parse(kind), experts=True),
        dense_us * 1e-6, token_us * 1e-6, max(0.0, machine.load_s(expert_bytes) - expert_bytes / bandwidth),
        predict_us * 1e-6,
    )  # fmt: skip


def _sweep(reader: TraceReader, tokens: int, profile: Profile, recorded_bits: int, most: int, *, share: bool) -> Sweep:
    meta, cached = reader.meta, dict[int, list[Step]]()

    def steps_of(batch: int) -> list[Step]:
        if batch not in cached:
            source: Iterable[Step] = batched(reader, batch) if batch else whole_steps(reader)
            cached[batch] = list(islice(source, tokens))
            if not cached[batch]:
                raise UsageError(f"{reader.path} has no tokens")
        return cached[batch]

    def make_predictor(name: str) -> Predictor | None:
        if name == "oracle":
            return Oracle(meta.num_layers, meta.num_experts)
        return find_predictor(name, meta.num_layers, meta.num_experts)

    return Sweep(
        steps_of, meta.num_experts, meta.num_experts_per_tok, profile, recorded_bits, make_predictor, most,
        share=share,
    )  # fmt: skip


def _places(memory: str | None, slots: str | None) -> list[tuple[str, str]]:
    if (memory is None) == (slots is None):
        raise UsageError("give --memory or --slots, one of them")
    return (
        [("--memory", text) for text in memory.split(",")]
        if memory
        else [("--slots", t) for t in str(slots).split(",")]
    )


def _configurations(
    places: list[tuple[str, str]], policy: str, predictor: str, staging: str, threshold: str, bits: str, batch: str,
    meta: TraceMeta, expert_bytes: int, fixed_bytes: int, recorded_bits: int,
) -> Iterable[Configuration]:  # fmt: skip
    """The grid. A combination that differs only in what has no effect (no predictor, no prefetch) is there once."""
    for name in policy.split(","):
        policy_factory(name)
    axes = (
        places, policy.split(","), predictor.split(","), _numbers("--staging", staging, int, 1, 8),
        _numbers("--threshold", threshold, float, 0, 1), _numbers("--bits", bits, int, 1, 16),
        _numbers("--batch", batch, int, 0, 4096),
    )  # fmt: skip
    seen = set()
    for (flag, text), one_policy, one_predictor, depth, limit, width, rows in product(*axes):
        size = round(expert_bytes * (width + SCALE_BITS) / (recorded_bits + SCALE_BITS))
        memory_bytes, layers = _slots(flag, text, meta, size, fixed_bytes)
        active = one_predictor != "none" and depth > 1
        config = Configuration(
            memory_bytes, layers, one_policy, one_predictor if active else "none", depth if active else 1,
            limit if active else 0.0, width, rows,
        )  # fmt: skip
        if config not in seen:
            seen.add(config)
            yield config


def _slots(flag: str, text: str, meta: TraceMeta, size: int, fixed_bytes: int) -> tuple[int, tuple[int, ...]]:
    """(budget or 0, slots of every layer)."""
    if flag == "--slots":
        (count,) = _numbers("--slots", text, int, 1, meta.num_experts)
        return 0, (int(count),) * meta.num_layers
    memory_bytes = parse_bytes(text, "--memory")
    needs = Needs(fixed_bytes, 0, 0, 0, 0, 0, size, meta.num_layers, meta.num_experts, meta.num_experts_per_tok)
    try:
        return memory_bytes, make_plan(memory_bytes, needs).slots
    except BudgetTooSmall as error:
        raise UsageError(f"{error}; --fixed and --expert-bytes say what the rest takes") from None


def _numbers(flag: str, text: str, kind: type[int] | type[float], low: float, high: float) -> list[Any]:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag} {text!r}: numbers, separated by commas, are needed") from None
    for value in values:
        if not low <= value <= high:
            raise UsageError(f"{flag} {value}: {low:g} to {high:g} are allowed")
    return values


def _show(results: list[Result], shown: list[Result], sweep: bool, as_json: bool) -> None:
    if as_json:
        answer: dict[str, Any] = {"results": [result.to_json() for result in results]}
        if sweep:
            answer["pareto"] = [{**one.to_json(), "flags": run_flags(one.configuration)} for one in shown]
        print(json.dumps(answer))
        return
    from rich.console import Console  # noqa: PLC0415  (tables are for people)
    from rich.table import Table  # noqa: PLC0415

    table = Table(title="the best of the grid" if sweep else None, box=None, padding=(0, 1))
    columns = ["memory", "slots", "policy", "predictor", "stage", "p>", "bits", "batch", "R", "tokens/s", "hit %", "LRU",
               "Belady", "bypass", "gap closed", "stall %", "bytes/token", "wasted"]  # fmt: skip
    for name in columns:
        table.add_column(name, justify="left" if name in ("policy", "predictor") else "right", no_wrap=True)
    for result in shown:
        table.add_row(*_cells(result))
    console = Console(width=None if Console().is_terminal else 200)
    console.print(table)
    if sweep:
        for result in shown:
            console.print(
                f"{result.outcome.tokens_per_s:.1f} tokens/s: {run_flags(result.configuration)}", highlight=False
            )


def _cells(result: Result) -> list[str]:
    config, outcome = result.configuration, result.outcome
    low, high = min(config.slots), max(config.slots)
    gap = result.gap_closed
    total = outcome.demand_bytes + outcome.speculative_bytes
    return [
        format_bytes(config.memory_bytes) if config.memory_bytes else "", str(low) if low == high else f"{low}-{high}",
        config.policy, Path(config.predictor).stem, str(config.staging), f"{config.threshold:.2f}", str(config.bits),
        str(config.batch or "rec."), f"{result.load_ratio:.2f}", f"{outcome.tokens_per_s:.2f}",
        f"{outcome.hit_ratio:.1%}", f"{result.lru_hit_ratio:.1%}", f"{result.belady_hit_ratio:.1%}",
        f"{result.bypass_hit_ratio:.1%}", "" if gap is None else f"{gap:.0%}", f"{outcome.stall_s / outcome.elapsed_s:.0%}",
        format_bytes(round(outcome.bytes_per_token)), f"{outcome.wasted_bytes / total:.0%}" if total else "0%",
    ]  # fmt: skip
