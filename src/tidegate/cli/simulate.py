"""``tidegate simulate``: what a memory size, policy, predictor, staging depth, width or batch would do, without the model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Annotated, Any

from tidegate.checkpoint.convert.options import ConvertOptions
from tidegate.cli.arguments import Argument, Flag
from tidegate.cli.files import check_output
from tidegate.cli.progress import counted
from tidegate.config import EngineOptions
from tidegate.errors import BudgetTooSmall, UsageError
from tidegate.experts.foreseer import REACH
from tidegate.experts.policy import DEFAULT_POLICY, policy_factory
from tidegate.experts.predictor_file import PredictorSource, find_predictor
from tidegate.experts.trace import TraceMeta, TraceReader
from tidegate.plan import Needs, make_plan
from tidegate.planner.headers import read_headers
from tidegate.planner.machine import Machine, load_machine
from tidegate.planner.profile import simulated_profile
from tidegate.quant.formats import Format
from tidegate.sim.ahead import Foresight, Gates
from tidegate.sim.batching import batched
from tidegate.sim.oracle import Oracle
from tidegate.sim.replay import Step, whole_steps
from tidegate.sim.simulate import Profile
from tidegate.sim.sweep import NO_FILES, SCALE_BITS, Configuration, Result, Sweep, pareto, run_flags
from tidegate.terminal import table
from tidegate.units import format_bytes, parse_bytes

_MACHINE, _GRID = "Machine and model", "What to try; several values, separated by commas, make a grid"


def _try(text: str, metavar: str | None = None) -> Any:
    return Flag(group=_GRID, help=text, metavar=metavar)


def _is(text: str, *names: str, metavar: str | None = None) -> Any:
    return Flag(*names, group=_MACHINE, help=text, metavar=metavar)


def command(
    trace: Annotated[Path, Argument(help="A trace of tidegate trace or run --trace.")],
    memory: Annotated[str | None, _try("Budgets, like 2GiB,4GiB.", "BYTES")] = None,
    slots: Annotated[str | None, _try("Slots a layer, instead of budgets.")] = None,
    policy: Annotated[str, _try("Who is evicted.")] = DEFAULT_POLICY,
    predictor: Annotated[
        str, _try("none, gates (the engine's own prefetch), last-token, window, decayed, oracle, or fitted files.")
    ] = "none",
    staging: Annotated[
        str, _try("Layers in work at once: 1 no prefetch, 2 the next layer, 3 as the engine, ...")
    ] = "3",
    threshold: Annotated[
        str, _try("Prefetch above this probability, instead of what the engine learns (auto).")
    ] = "auto",
    bits: Annotated[str | None, _try("Expert widths, like 3,4,8.")] = None,
    batch: Annotated[str, _try("Sequences decoded side by side; 0: the steps as recorded.")] = "0",
    tokens: Annotated[int, Flag(min=1, help="Stop after this many steps of the trace.")] = 4000,
    most: Annotated[int, Flag(min=1, help="Speculative loads a layer at most, with a given threshold.")] = 4,
    no_share: Annotated[bool, Flag("--no-share", help="Slots do not move between layers.")] = False,
    disk: Annotated[str | None, _is("Disk reads a second; default: tidegate hardware's.", metavar="BYTES")] = None,
    ram: Annotated[str | None, _is("Memory reads a second; default: tidegate hardware's.", metavar="BYTES")] = None,
    model: Annotated[str | None, _is("The trace's model: how long its parts take, from its headers.")] = None,
    dense_us: Annotated[float | None, _is("A layer without its routed experts; default: the model's, or 300.")] = None,
    token_us: Annotated[float | None, _is("Embedding, logits, sampling; default: the model's logits, or 1000.")] = None,
    predict_us: Annotated[float | None, _is("One call of the predictor; default: the model's gate, or 20.")] = None,
    expert_size: Annotated[
        str | None, _is("One expert; default: the trace's.", "--expert-bytes", metavar="BYTES")
    ] = None,
    fixed: Annotated[
        str | None, _is("All memory but expert slots and predictor; default: the trace's.", metavar="BYTES")
    ] = None,
    recorded_bits: Annotated[int, _is("Bits that an expert's size is of.")] = 4,
    sweep: Annotated[
        str | None,
        Flag(metavar="grid|optuna", help="Show only the best: of the grid, or of what Optuna tries (extra: sweep)."),
    ] = None,
    trials: Annotated[int, Flag(min=1, help="How often Optuna tries.")] = 60,
    seed: Annotated[int, Flag(help="Of Optuna; same seed, same answer.")] = 0,
    plot: Annotated[Path | None, Flag(metavar="FILE.png", help="Draw speed and hits against memory.")] = None,
    as_json: Annotated[bool, Flag("--json", help="Print one JSON object.")] = False,
) -> int:
    """Runs the engine's own cache, policies and predictors against a clock and one I/O channel. Caches start empty."""
    if sweep not in (None, "grid", "optuna"):
        raise UsageError(f"--sweep {sweep!r}: grid or optuna")
    if plot is not None:
        check_output(plot, "--plot")
        if plot.suffix.lower() != ".png":
            raise UsageError(f"--plot {plot}: the plot is a PNG; give a name that ends in .png")
    reader = TraceReader(trace)
    meta = reader.meta
    expert_bytes = parse_bytes(expert_size, "--expert-bytes") if expert_size else meta.expert_bytes
    if not expert_bytes:
        raise UsageError(f"{trace} does not say how large an expert is; add --expert-bytes")
    rates = {name: parse_bytes(text, f"--{name}") if text else None for name, text in (("ram", ram), ("disk", disk))}
    machine = load_machine(model or trace).with_rates(rates["ram"], rates["disk"])
    times = {"dense_s": dense_us, "token_s": token_us, "predict_s": predict_us}
    profile = _profile(machine, expert_bytes, recorded_bits, times, model)
    fixed_bytes = parse_bytes(fixed, "--fixed") if fixed else meta.fixed_bytes
    axes = _axes(
        _places(memory, slots), policy, predictor, staging, threshold, bits or str(recorded_bits), batch
    )  # fmt: skip
    configure = partial(_configure, meta, expert_bytes, fixed_bytes, recorded_bits)
    simulated = _sweep(reader, tokens, profile, recorded_bits, most, share=not no_share)
    results = _run_all(sweep, axes, configure, simulated.run, trials, seed)
    best = pareto(results) if sweep else []
    if plot is not None:
        from tidegate.sim.sweep_plot import plot_results  # noqa: PLC0415  (needs matplotlib)

        plot_results(plot, results, best)
    _show(results, best, as_json)
    return 0


def _run_all(
    sweep: str | None,
    axes: dict[str, list[Any]],
    configure: Callable[..., Configuration],
    run: Callable[[Configuration], Result],
    trials: int,
    seed: int,
) -> list[Result]:
    """The whole grid, or what Optuna tries of it."""
    grid = (
        {}
        if sweep == "optuna"
        else dict.fromkeys(configure(**dict(zip(axes, values, strict=True))) for values in product(*axes.values()))
    )
    with counted("configurations simulated") as progress:
        advance = progress.of(len(grid) or trials)

        def run_one(config: Configuration) -> Result:
            result = run(config)
            advance(1)
            return result

        if sweep != "optuna":
            return list(map(run_one, grid))
        from tidegate.sim.search import search  # noqa: PLC0415  (needs Optuna)

        return search(axes, configure, run_one, trials, seed)


def _profile(
    machine: Machine, expert_bytes: int, recorded_bits: int, times_us: dict[str, float | None], model: str | None
) -> Profile:
    """``times_us``: what the flags say, if anything, of ``dense_s``, ``token_s`` and ``predict_s``."""
    given: dict[str, Any] = {name: value * 1e-6 for name, value in times_us.items() if value is not None}
    if model is not None:
        headers, threads = read_headers(model, ConvertOptions()), len(os.sched_getaffinity(0))
        found = simulated_profile(headers, EngineOptions(), machine, threads)
        if found.expert_bytes != expert_bytes:
            raise UsageError(
                f"--model {model}: its experts have {found.expert_bytes:,} bytes, the trace's {expert_bytes:,}"
            )
        return replace(found, **given)
    bandwidth = machine.disk_bytes_per_s(expert_bytes)
    kind = "int4-g32" if recorded_bits <= 4 else "int8-g32"
    return Profile(
        expert_bytes, bandwidth, expert_bytes / machine.decode_bytes_per_s(Format.parse(kind), experts=True),
        **{"dense_s": 300e-6, "token_s": 1e-3, "predict_s": 20e-6, **given},
        wake_s=machine.bookkeeping.wake_s, first_read_s=machine.first_read_s(expert_bytes),
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

    def make_predictor(name: str) -> Foresight | None:
        if name == "gates":
            if not meta.guess_reach:
                raise UsageError(
                    f"--predictor gates: {reader.path} does not say what the gates guessed; record it again"
                )
            return Gates(meta.guess_curves)
        if name == "oracle":
            return Oracle(meta.num_layers, meta.num_experts)
        return None if name == "none" else _source(name, meta).load()

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


def _axes(
    places: list[tuple[str, str]], policy: str, predictor: str, staging: str, threshold: str, bits: str, batch: str
) -> dict[str, list[Any]]:
    """The choices, under the names that ``_configure`` takes them by."""
    for name in policy.split(","):
        policy_factory(name)
    return {
        "place": places, "policy": policy.split(","), "predictor": predictor.split(","),
        "staging": _numbers("--staging", staging, int, 1, 8), "threshold": _thresholds(threshold),
        "bits": _numbers("--bits", bits, int, 1, 16), "batch": _numbers("--batch", batch, int, 0, 4096),
    }  # fmt: skip


def _configure(
    meta: TraceMeta, expert_bytes: int, fixed_bytes: int, recorded_bits: int, *, place: tuple[str, str], policy: str,
    predictor: str, staging: int, threshold: float | None, bits: int, batch: int,
) -> Configuration:  # fmt: skip
    """What has no effect (without a predictor, or of the engine's own prefetch) is set to the same everywhere."""
    size = round(expert_bytes * (bits + SCALE_BITS) / (recorded_bits + SCALE_BITS))
    if predictor not in NO_FILES:
        fixed_bytes += _source(predictor, meta).heap_bytes(meta.num_experts_per_tok, max(1, batch), 0)
    memory_bytes, layers = _slots(*place, meta, size, fixed_bytes)
    if predictor == "none" or staging == 1:
        predictor, staging, threshold = "none", 1, 0.0
    elif predictor == "gates":
        staging, threshold = REACH + 1, None
    return Configuration(memory_bytes, layers, policy, predictor, staging, threshold, bits, batch)


def _source(predictor: str, meta: TraceMeta) -> PredictorSource:
    return find_predictor(predictor, meta.num_layers, meta.num_experts, meta.fingerprint)


def _slots(flag: str, text: str, meta: TraceMeta, size: int, fixed_bytes: int) -> tuple[int, tuple[int, ...]]:
    """(budget or 0, slots of every layer)."""
    if flag == "--slots":
        (count,) = _numbers("--slots", text, int, 1, meta.num_experts)
        return 0, (int(count),) * meta.num_layers
    memory_bytes = parse_bytes(text, "--memory")
    needs = Needs(fixed_bytes, 0, 0, 0, 0, size, meta.num_layers, meta.num_experts, meta.num_experts_per_tok)
    try:
        return memory_bytes, make_plan(memory_bytes, needs).slots
    except BudgetTooSmall as error:
        raise UsageError(f"{error}; --fixed and --expert-bytes say what the rest takes") from None


def _thresholds(text: str) -> list[float | None]:
    return [None if one == "auto" else _numbers("--threshold", one, float, 0, 1)[0] for one in text.split(",")]


def _numbers(flag: str, text: str, kind: type[int] | type[float], low: float, high: float) -> list[Any]:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag} {text!r}: numbers, separated by commas, are needed") from None
    for value in values:
        if not low <= value <= high:
            raise UsageError(f"{flag} {value}: {low:g} to {high:g} are allowed")
    return values


def _show(results: list[Result], best: list[Result], as_json: bool) -> None:
    """All results, or with a sweep the best of them."""
    if as_json:
        answer: dict[str, Any] = {"results": [result.to_json() for result in results]}
        if best:
            answer["pareto"] = [{**one.to_json(), "flags": run_flags(one.configuration)} for one in best]
        print(json.dumps(answer))
        return
    columns = ["memory", "slots", "policy", "predictor", "stage", "p>", "bits", "batch", "R", "tokens/s", "hit %", "LRU",
               "Belady", "bypass", "gap closed", "stall %", "bytes/token", "wasted"]  # fmt: skip
    rows = [_cells(result) for result in best or results]
    print(table(columns, rows, f"the best of {len(results)}" if best else "", left=("policy", "predictor")))
    for result in best:
        print(f"{result.outcome.tokens_per_s:.1f} tokens/s: {run_flags(result.configuration)}")


def _cells(result: Result) -> list[str]:
    config, outcome = result.configuration, result.outcome
    low, high = min(config.slots), max(config.slots)
    gap = result.gap_closed
    total = outcome.demand_bytes + outcome.speculative_bytes
    return [
        format_bytes(config.memory_bytes) if config.memory_bytes else "", str(low) if low == high else f"{low}-{high}",
        config.policy, Path(config.predictor).stem, str(config.staging),
        "auto" if config.threshold is None else f"{config.threshold:.2f}", str(config.bits),
        str(config.batch or "rec."), f"{result.load_ratio:.2f}", f"{outcome.tokens_per_s:.2f}",
        f"{outcome.hit_ratio:.1%}", f"{result.lru_hit_ratio:.1%}", f"{result.belady_hit_ratio:.1%}",
        f"{result.bypass_hit_ratio:.1%}", "" if gap is None else f"{gap:.0%}", f"{outcome.stall_s / outcome.elapsed_s:.0%}",
        format_bytes(round(outcome.bytes_per_token)), f"{outcome.wasted_bytes / total:.0%}" if total else "0%",
    ]  # fmt: skip
