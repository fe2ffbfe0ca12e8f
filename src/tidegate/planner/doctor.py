"""The doctor: a run compared with its plan, and in words what is slow and which flag would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidegate.engine.needs import PackedModel, Sizes
from tidegate.plan import Plan, make_plan
from tidegate.planner.forecast import Forecast, make_forecast
from tidegate.planner.machine import Machine
from tidegate.planner.routing import expected_hits
from tidegate.units import format_bytes

LEDGER_TOLERANCE, SLOW, BUSY = 0.03, 0.8, 0.1
LEDGER_TOLERANCE_BYTES = 4 << 20  # of a small process; the doctor itself imports more than a run


@dataclass(frozen=True)
class Observed:
    """A finished run. ``stats`` are those of ``Model.stats``; ``wait_s`` of the decoding was spent waiting for loads;
    ``demand_hit_ratio``: of all expert visits of the decoding, those that prefetch had no part in, as forecasts count;
    ``workspace_peak_bytes`` is what activations took of the workspace; ``busy_ratio`` what others took of the processors."""

    model: PackedModel
    plan: Plan
    sizes: Sizes
    machine: Machine
    threads: int
    stats: Mapping[str, Any]
    demand_hit_ratio: float
    wait_s: float
    workspace_peak_bytes: int
    busy_ratio: float

    @property
    def tokens_per_s(self) -> float:
        return float(self.stats["decode_tokens"] / self.stats["decode_s"]) if self.stats["decode_s"] else 0.0

    def forecast(self, plan: Plan | None = None, hit_ratio: float | None = None) -> Forecast:
        """Of this plan or another one; with the hit rate that was measured instead of a curve's."""
        plan = plan or self.plan
        hits = expected_hits(self.model.config.family, plan.resident_ratio)
        if hit_ratio is not None:
            hits = type(hits)(hit_ratio, hit_ratio, hit_ratio, "this run")
        prompt = max(1, self.sizes.context_tokens // 4)
        return make_forecast(
            self.model, plan, self.sizes, self.machine, hits, threads=self.threads, prompt_tokens=prompt
        )


def comparison(run: Observed) -> list[tuple[str, str, str]]:
    """(what, planned, real) for a table."""
    stats, needs, found = run.stats, run.plan.needs, run.forecast()
    rows = [
        ("memory at its peak", format_bytes(stats["ledger_bytes"]), format_bytes(stats["peak_bytes"])),
        ("activations", format_bytes(needs.workspace_bytes), format_bytes(run.workspace_peak_bytes)),
        ("decode, tokens/s", f"{found.decode_tokens_per_s:.1f}", f"{run.tokens_per_s:.1f}"),
    ]
    if run.plan.slots:
        waiting = found.step.wait_s / found.step.total_s
        rows += [
            ("hits without prefetch", f"{found.hits.expected:.0%}", f"{run.demand_hit_ratio:.0%}"),
            ("waiting for loads", f"{waiting:.0%}", f"{run.wait_s / max(stats['decode_s'], 1e-9):.0%}"),
        ]
    return rows


def findings(run: Observed) -> list[str]:
    """Sentences, the most useful first: what is wrong, then what is slow by the speed that a flag would give."""
    return [*_wrong(run), *_doubts(run), *_slow(run)] or ["nothing to complain about"]


def _wrong(run: Observed) -> list[str]:
    stats, out = run.stats, []
    if stats["peak_bytes"] > stats["budget_bytes"]:
        over = stats["peak_bytes"] - stats["budget_bytes"]
        out.append(f"the process passed its budget by {format_bytes(over)}: please report this")
    off_bytes = abs(stats["ledger_bytes"] - stats["peak_bytes"])
    if off_bytes > max(LEDGER_TOLERANCE * stats["peak_bytes"], LEDGER_TOLERANCE_BYTES):
        error = off_bytes / stats["peak_bytes"]
        out.append(f"the ledger and the kernel differ by {error:.0%}: please report this")
    if run.workspace_peak_bytes > run.plan.needs.workspace_bytes:
        out.append("activations took more than was planned for them: please report this")
    return out


def _doubts(run: Observed) -> list[str]:
    out = []
    if run.busy_ratio > BUSY:
        out.append(f"others used {run.busy_ratio:.0%} of the processors meanwhile: speeds below are too low")
    if not run.machine.is_measured:
        out.append("the forecast's rates are assumed: run tidegate hardware once on this machine")
        return out
    exact = run.forecast(hit_ratio=run.demand_hit_ratio)
    if run.tokens_per_s < SLOW * exact.decode_tokens_per_s and run.busy_ratio <= BUSY:
        step = exact.step
        waited = run.wait_s / max(run.stats["decode_tokens"], 1)
        slow = "reading experts" if waited > 1.25 * step.wait_s else "computing"
        out.append(
            f"{slow} is slower than this machine was measured to be: "
            + (
                "is the disk shared, or another one than was measured?"
                if slow == "reading experts"
                else f"--threads {run.threads} should be the number of free cores"
            )
        )
    if abs(run.demand_hit_ratio - exact_hits(run)) > 0.15:
        out.append(
            f"without prefetch the hit rate is {run.demand_hit_ratio:.0%} where a usual model has {exact_hits(run):.0%}: "
            "record a trace (tidegate trace) and give it to tidegate plan --trace"
        )
    return out


def exact_hits(run: Observed) -> float:
    """What the curve says."""
    return expected_hits(run.model.config.family, run.plan.resident_ratio).expected


def _slow(run: Observed) -> list[str]:
    """Budgets that would help, if waiting for loads is a good part of the time."""
    if not run.plan.slots or run.wait_s < 0.2 * run.stats["decode_s"]:
        return []
    needs, now = run.plan.needs, run.forecast().decode_tokens_per_s
    share = run.wait_s / run.stats["decode_s"]
    out = [f"{share:.0%} of the decoding was spent waiting for experts from disk"]
    budgets = {"half as much again": run.plan.budget_bytes * 3 // 2, "every expert": needs.largest_useful_bytes}
    for what, budget in budgets.items():
        budget = min(budget, needs.largest_useful_bytes)
        rate = run.forecast(make_plan(budget, needs)).decode_tokens_per_s
        if rate > 1.1 * now:
            out.append(f"--memory {budget >> 20}MiB ({what}) would make it {rate / now:.1f} times as fast")
    fmt = run.model.layouts[0].fmt
    if fmt.kind in ("int8", "bf16", "f32"):
        bits = {"int8": 8, "bf16": 16, "f32": 32}[fmt.kind]
        out.append(f"convert with --experts int4: {bits / 4:.0f} times fewer bytes a miss (about 1.6 % perplexity)")
    return list(dict.fromkeys(out))
