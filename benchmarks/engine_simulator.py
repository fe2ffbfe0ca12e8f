"""The simulator against the live engine: one model, 5 budgets x 4 policies, prefetch off and on.

    python benchmarks/engine_simulator.py STORE OUT.md [--tokens 1000] [--text FILE] [--repeat 5] [--off-once]

Run it on an idle machine. A trace is recorded once, with everything in memory; then the engine reads the same tokens one
by one in every configuration, a process each, and the simulator runs the trace with that run's slots and the rates that
`tidegate hardware` measured. Without prefetch hits, misses and evictions must be equal; with it hit rates may differ by 1
point and tokens/s by 12 %, because both depend on when loads end. Exit code 1 if they do not. Whether guessing pays, which
the engine tries by the time of its steps, is not asked here: with prefetch all steps have guesses in both.

The disk of a shared host is up to half as fast again or as slow from one second to the next, and its processors move: two that
share a cache read less memory together and answer each other twice as fast as two that do not. So between all runs the disk
and the mood of the processors are measured, for a tenth of a second, and the machine in every round and whenever it is in a
mood that was not measured yet. A run in which the mood changed is repeated, and each is compared with a simulation on the
machine in its mood (the middle of what was measured of it) and the disk of its moment. The table has medians over the rounds.
Without a tokenizer the tokens are random.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tidegate import _core
from tidegate.backends.operands import ByteArray
from tidegate.checkpoint.store import ExpertStore
from tidegate.config import EngineOptions, parse_options
from tidegate.engine import bench
from tidegate.engine.source import open_store
from tidegate.experts.policy import policy_factory
from tidegate.experts.trace import TraceReader
from tidegate.experts.trial import Trial
from tidegate.planner.costs import middle
from tidegate.planner.machine import DiskRate, Machine
from tidegate.planner.measure import probe_memory
from tidegate.planner.measure_disk import DiskProbe
from tidegate.planner.measure_kernels import Kernels
from tidegate.planner.profile import simulated_profile
from tidegate.sim.ahead import Gates
from tidegate.sim.replay import Step, whole_steps
from tidegate.sim.simulate import Outcome, simulate

Trial.begin_step = lambda self, num_loads: True  # type: ignore[method-assign]
POLICIES = ("decayed-lfu", "lru", "lfu", "lfru")
SHARES = (0.0, 0.15, 0.3, 0.5, 0.8)  # of the way from the smallest budget to one that holds every expert
MOST_POINTS, MOST_ERROR = 1.0, 0.12
COUNTERS = ("demand_hits", "misses", "evictions")
PROBE_BYTES, WORKSPACE_BYTES = 256 << 20, 64 << 20
MOST_CHANGE, TRIES, MOST_MACHINES, DISK_SAMPLES = 0.25, 3, 10, 2
Point = tuple[float, str, str]  # share, policy, prefetch
TEXT = Path(bench.__file__).with_suffix(".txt")
CHILD = """
import json, sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
import numpy as np
from tidegate import load
from tidegate.config import SamplingOptions
from tidegate.engine.sequence import Sequence
from tidegate.errors import CheckpointError
from tidegate.experts.trial import Trial
Trial.begin_step = lambda self, num_loads: True
asked = json.loads(sys.argv[1])
with load(asked["store"], **asked["options"]) as model:
    engine, ids, count = model.runtime.engine, asked.get("ids"), asked["tokens"]
    if ids is None:
        try:
            ids = model.encode(Path(asked["text"]).read_text(encoding="utf-8"))
        except CheckpointError:
            ids = np.random.default_rng(0).integers(0, model.runtime.config.vocab_size, count).tolist()
    sequence = Sequence(1, ids[:1], count, SamplingOptions(ignore_eos=True))
    with model.trace(Path(asked["trace"])) if "trace" in asked else nullcontext():
        engine.scheduler.add(sequence)
        for token in [*ids[1:count], 0]:  # whatever the model chooses, it reads on with the given tokens
            engine.step()
            if sequence.error is not None:
                raise sequence.error
            sequence.tokens[-1] = token
    loader = model.runtime.loader.counters()
    reads = {"read_s": loader.busy_ns * 1e-9, "reads": loader.read_bytes / model.plan.needs.slot_bytes}
    reads |= {"wake_s": loader.wake_ns * 1e-9, "wakes": loader.wakes, "wait_s": loader.wait_ns * 1e-9}
    print(json.dumps({**model.stats(), **reads, "slots": model.plan.slots, "needs": asdict(model.plan.needs)}))
"""


def child(**asked: Any) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", CHILD, json.dumps(asked)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["tokens_per_s"] = asked["tokens"] / (found["prefill_s"] + found["decode_s"])
    return found


def hardware(store: str) -> Machine:
    """What the machine is like now."""
    command = [sys.executable, "-m", "tidegate", "hardware", store, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    return Machine.from_json(json.loads(done.stdout))


@dataclass(frozen=True)
class Moment:
    """The machine just now: its disk, what all threads read of memory a second, and what a layer without bytes takes them."""

    disk: DiskRate
    memory_bytes_per_s: float
    together_s: float

    def apart(self, other: Moment) -> float:
        """How far from another one's mood, as a ratio."""
        pairs = (self.memory_bytes_per_s, other.memory_bytes_per_s), (self.together_s, other.together_s)
        return max(max(pair) / min(pair) for pair in pairs) - 1

    def middle(self, other: Moment) -> Moment:
        """Of the time between them."""
        disk = {name: (value + asdict(other.disk)[name]) / 2 for name, value in asdict(self.disk).items()}
        memory = (self.memory_bytes_per_s + other.memory_bytes_per_s) / 2
        return Moment(DiskRate(**disk), memory, (self.together_s + other.together_s) / 2)


class Probe:
    """Looks at the machine, and at the disk where a store's experts are read from by the probe of `tidegate hardware`."""

    def __init__(self, store: ExpertStore, memory: ByteArray) -> None:
        weights, workspace = memory[:PROBE_BYTES], memory[PROBE_BYTES:]
        weights[:] = 0x33  # ordinary numbers in every format
        threads = len(os.sched_getaffinity(0))
        self._kernels = Kernels(weights, _core.Compute(threads, workspace, _core.available_isas()[0]))
        self._path, self._layout = store.paths[0], store.layouts[0]

    def now(self) -> Moment:
        """Takes about a tenth of a second."""
        probe = DiskProbe(self._path, self._kernels, self._layout)
        for _ in range(DISK_SAMPLES):
            probe.sample()
        return Moment(probe.rate(), self._kernels.reads(), self._kernels.together_s())


@dataclass
class Run:
    """What the engine counted, and between which moments; how much the mood changed meanwhile."""

    live: dict[str, Any]
    moment: Moment
    change: float


class Comparison:
    """A store, its recorded steps, and the runs so far."""

    def __init__(self, store: str, text: Path, tokens: int, folder: Path) -> None:
        self.store, self.tokens = store, tokens
        self.context = tokens + 1
        trace = folder / "recorded.trace"
        options = {
            "context": self.context
        }  # with prefetch, so that the trace has the guesses of the fitted gates, if any
        self.needs = child(store=store, options=options, tokens=tokens, text=str(text), trace=str(trace))["needs"]
        reader = TraceReader(trace)
        self.steps: list[Step] = list(whole_steps(reader))
        self.curves = reader.meta.guess_curves
        self.ids = [step.token_T[0] for step in self.steps]
        assert len(self.ids) == tokens, f"the text has {len(self.ids)} tokens"
        self.options = parse_options(EngineOptions, {"context": self.context})
        self.opened = open_store(store, self.options)
        self.machines: list[tuple[Moment, Machine]] = []
        self._measured = 0
        self.runs: dict[Point, list[Run]] = {}

    def round(self, points: Iterable[Point]) -> None:
        """Run every configuration once."""
        with probe_memory(PROBE_BYTES + WORKSPACE_BYTES) as memory:
            probe = Probe(self.opened, memory)
            after = probe.now()
            for point in points:
                tries = list[Run]()
                while not tries or (tries[-1].change > MOST_CHANGE and len(tries) < TRIES):
                    before, live = after, self._live(*point)
                    after = probe.now()
                    tries.append(Run(live, before.middle(after), before.apart(after)))
                self.runs.setdefault(point, []).append(min(tries, key=lambda run: run.change))
                if self._measured < MOST_MACHINES and self._apart(after) > MOST_CHANGE:
                    after = self._measure(probe, after)
            self._measure(probe, after)

    def _measure(self, probe: Probe, before: Moment) -> Moment:
        """What the machine is like, unless its mood changes meanwhile."""
        self._measured += 1
        machine, after = hardware(self.store), probe.now()
        if before.apart(after) <= MOST_CHANGE and machine.drift_ratio <= MOST_CHANGE:
            self.machines.append((before.middle(after), machine))
        return after

    def _apart(self, moment: Moment) -> float:
        """How far the moment is from the nearest mood that was measured."""
        return min((then.apart(moment) for then, _ in self.machines), default=float("inf"))

    def _machine(self, moment: Moment) -> Machine:
        """The middle of the machines as measured in the moment's mood, or in the nearest."""
        assert self.machines, "no moment was quiet enough to measure the machine"
        most = max(MOST_CHANGE, self._apart(moment))
        return Machine.from_json(
            middle([machine.to_json() for then, machine in self.machines if then.apart(moment) <= most])
        )

    def _memory(self, share: float) -> int:
        needs = self.needs
        least, most = needs["num_layers"] * needs["min_slots"], needs["num_layers"] * needs["num_experts"]
        slots = round(least + share * (most - least))
        fixed = sum(
            needs[name] for name in needs if name.endswith("_bytes") and name not in ("slot_bytes", "start_peak_bytes")
        )
        return int((fixed + slots * needs["slot_bytes"]) / (1 - 2**-9)) + (4 << 20)

    def _live(self, share: float, policy: str, prefetch: str) -> dict[str, Any]:
        options = {"memory": self._memory(share), "policy": policy, "prefetch": prefetch, "context": self.context}
        return child(store=self.store, options=options, tokens=self.tokens, ids=self.ids)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Of every configuration what its runs came to, and the simulator with the same slots and disk."""
        for (share, policy, prefetch), runs in self.runs.items():
            live = [run.live for run in runs]
            found = [self._simulated(policy, run, prefetch) for run in runs]
            hits, simulated_hits = [hit_ratio(one) for one in live], [100 * one.hit_ratio for one in found]
            speeds, simulated_speeds = [one["tokens_per_s"] for one in live], [one.tokens_per_s for one in found]
            pairs = zip(simulated_hits, hits, strict=True), zip(simulated_speeds, speeds, strict=True)
            yield {
                "share": share, "policy": policy, "prefetch": prefetch,
                "resident": sum(live[0]["slots"]) / (self.needs["num_layers"] * self.needs["num_experts"]),
                "equal": all(one[name] == getattr(replayed.counters, name)
                             for one, replayed in zip(live, found, strict=True) for name in COUNTERS),
                "apart": [max(run.change, self._apart(run.moment)) for run in runs],
                "live": live, "simulated": [vars(one.counters) for one in found],
                "hits": hits, "simulated_hits": simulated_hits, "speeds": speeds, "simulated_speeds": simulated_speeds,
                "points": statistics.median(ours - theirs for ours, theirs in pairs[0]),
                "error": statistics.median(ours / theirs - 1 for ours, theirs in pairs[1]),
            }  # fmt: skip

    def _simulated(self, policy: str, run: Run, prefetch: str) -> Outcome:
        then = replace(self._machine(run.moment), disk=(run.moment.disk,))
        profile = simulated_profile(self.opened, self.options, then, len(os.sched_getaffinity(0)))
        return simulate(
            self.steps, run.live["slots"], self.needs["num_experts"], policy_factory(policy), profile,
            Gates(self.curves) if prefetch == "auto" else None, share=True,
        )  # fmt: skip


def hit_ratio(live: dict[str, Any]) -> float:
    """In per cent; demand hits and prefetch hits."""
    return 100 * (1 - live["misses"] / (live["demand_hits"] + live["prefetch_hits"] + live["misses"]))


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    off = [row for row in rows if row["prefetch"] == "off"]
    on = [row for row in rows if row["prefetch"] == "auto"]
    equal = sum(row["equal"] for row in off)
    yield f"Without prefetch: hits, misses and evictions equal in {equal} of {len(off)}; {_errors(off)}."
    points = sorted(abs(row["points"]) for row in on) or [0.0]
    apart = f"hit rates {statistics.median(points):.2f} points apart in the middle, {points[-1]:.2f} at most"
    yield f"With prefetch: {apart}; {_errors(on)}."
    spans = [(max(row["hits"]) - min(row["hits"]), max(row["speeds"]) / min(row["speeds"]) - 1) for row in on]
    if spans and len(on[0]["hits"]) > 1:
        (points, middle_points), (speed, middle_speed) = (
            (max(column), statistics.median(column)) for column in zip(*spans, strict=True)
        )
        yield (
            f"Runs of the engine in one configuration differ by {middle_points:.2f} points and {middle_speed:.0%} in the middle, "
            f"{points:.2f} and {speed:.0%} at most."
        )
    apart = [change > MOST_CHANGE for row in rows for change in row["apart"]]
    yield f"Of {len(apart)} runs {sum(apart)} were not all in a mood of the machine that was measured."
    yield ""
    head = "hits live, % | simulated | points | loads ahead live | simulated | tokens/s live | simulated | error"
    yield f"| resident | policy | prefetch | {head} |"
    yield "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        issued, ahead = ([one["prefetch_issued"] for one in row[who]] for who in ("live", "simulated"))
        cells = [
            f"{row['resident']:.0%}", row["policy"], row["prefetch"], _span(row["hits"], ".1f"),
            f"{statistics.median(row['simulated_hits']):.1f}", f"{row['points']:+.2f}",
            _span(issued, ".0f"), f"{statistics.median(ahead):.0f}",
            _span(row["speeds"], ".0f"), f"{statistics.median(row['simulated_speeds']):.0f}", f"{row['error']:+.0%}",
        ]  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"


def _span(values: list[float], digits: str) -> str:
    """The median, and from where to where."""
    low, high = (format(value, digits) for value in (min(values), max(values)))
    return format(statistics.median(values), digits) + ("" if low == high else f" ({low} to {high})")


def _errors(rows: list[dict[str, Any]]) -> str:
    errors = sorted(abs(row["error"]) for row in rows)
    return (
        f"tokens/s off by {statistics.median(errors):.0%} in the middle, {errors[-1]:.0%} at most"
        if errors
        else "no runs"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="a store, or builtin")
    parser.add_argument("out", type=Path, help="Markdown with the table; numbers as JSON beside it")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--off-once", action="store_true", help="without prefetch, where counts do not vary, a single run"
    )
    args = parser.parse_args()
    with TemporaryDirectory(prefix="tidegate-simulator-") as folder:
        comparison = Comparison(args.store, args.text, args.tokens, Path(folder))
        for number in range(args.repeat):
            modes = ("auto",) if args.off_once and number else ("off", "auto")
            comparison.round(product(SHARES, POLICIES, modes))
            rows = sorted(
                comparison.rows(),
                key=lambda row: (row["share"], POLICIES.index(row["policy"]), row["prefetch"] != "off"),
            )
            text = "\n".join(table(rows))
            args.out.write_text(text + "\n", encoding="utf-8")
            numbers = {"rows": rows, "machines": [machine.to_json() for _, machine in comparison.machines]}
            args.out.with_suffix(".json").write_text(json.dumps(numbers), encoding="utf-8")
            print(f"round {number + 1} of {args.repeat}", file=sys.stderr, flush=True)
    print(text)
    good = all(
        row["equal"]
        if row["prefetch"] == "off"
        else abs(row["points"]) <= MOST_POINTS and abs(row["error"]) <= MOST_ERROR
        for row in rows
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
