"""The simulator against the live engine: one model, 5 budgets x 4 policies, prefetch off and on.

    tidegate hardware STORE
    python benchmarks/engine_simulator.py STORE OUT.md [--tokens 256] [--text FILE] [--repeat 3]

Run both on an idle machine. A trace is recorded once, with everything in memory; then the engine reads the same tokens one
by one in every configuration, a process each, and the simulator runs the trace with the plan's slots and the rates that
`tidegate hardware` measured. Without prefetch hits, misses and evictions must be equal; with it hit rates may differ by 1
point and tokens/s by 12 %, because both depend on when loads end. Exit code 1 if they do not. Without a tokenizer the tokens
are random.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tidegate.checkpoint.store import ExpertStore
from tidegate.config import EngineOptions, parse_options
from tidegate.engine import bench
from tidegate.experts.policy import policy_factory
from tidegate.experts.trace import TraceReader
from tidegate.planner.machine import load_machine
from tidegate.planner.profile import simulated_profile
from tidegate.sim.ahead import Gates
from tidegate.sim.replay import Step, whole_steps
from tidegate.sim.simulate import Outcome, Profile, simulate

POLICIES = ("decayed-lfu", "lru", "lfu", "lfru")
SHARES = (0.0, 0.15, 0.3, 0.5, 0.8)  # of the way from the smallest budget to one that holds every expert
MOST_POINTS, MOST_ERROR = 1.0, 0.12
COUNTERS = ("demand_hits", "misses", "evictions")
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
    print(json.dumps({**model.stats(), "slots": model.plan.slots, "needs": asdict(model.plan.needs)}))
"""


def child(**asked: Any) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", CHILD, json.dumps(asked)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["tokens_per_s"] = asked["tokens"] / (found["prefill_s"] + found["decode_s"])
    return found


class Comparison:
    """A store, its recorded steps, and the model's times on this machine."""

    def __init__(self, store: Path, text: Path, tokens: int, repeat: int, folder: Path) -> None:
        self.store, self.tokens, self.repeat = store, tokens, repeat
        self.context = tokens + 1
        trace = folder / "recorded.trace"
        options = {
            "context": self.context
        }  # with prefetch, so that the trace has the guesses of the fitted gates, if any
        self.needs = child(store=str(store), options=options, tokens=tokens, text=str(text), trace=str(trace))["needs"]
        reader = TraceReader(trace)
        self.steps: list[Step] = list(whole_steps(reader))
        self.curves = reader.meta.guess_curves
        self.ids = [step.token_T[0] for step in self.steps]
        assert len(self.ids) == tokens, f"the text has {len(self.ids)} tokens"
        threads = len(os.sched_getaffinity(0))
        self.machine = load_machine(store)
        asked = parse_options(EngineOptions, {"context": self.context})
        self.profile: Profile = simulated_profile(ExpertStore.open(store), asked, self.machine, threads)

    def memory(self, share: float) -> int:
        needs = self.needs
        least, most = needs["num_layers"] * needs["min_slots"], needs["num_layers"] * needs["num_experts"]
        slots = round(least + share * (most - least))
        fixed = sum(
            needs[name] for name in needs if name.endswith("_bytes") and name not in ("slot_bytes", "start_peak_bytes")
        )
        return int((fixed + slots * needs["slot_bytes"]) / (1 - 2**-9)) + (4 << 20)

    def live(self, policy: str, share: float, prefetch: str) -> dict[str, Any]:
        """Of several runs that with the middle speed; without prefetch their counts are the same."""
        options = {"memory": self.memory(share), "policy": policy, "prefetch": prefetch, "context": self.context}
        asked = {"store": str(self.store), "options": options, "tokens": self.tokens, "ids": self.ids}
        runs = sorted((child(**asked) for _ in range(self.repeat)), key=lambda run: run["tokens_per_s"])
        return runs[len(runs) // 2]

    def simulated(self, policy: str, slots: list[int], prefetch: str) -> Outcome:
        return simulate(
            self.steps, slots, self.needs["num_experts"], policy_factory(policy), self.profile,
            Gates(self.curves) if prefetch == "auto" else None, share=True,
        )  # fmt: skip

    def rows(self) -> Iterator[dict[str, Any]]:
        for share, policy, prefetch in product(SHARES, POLICIES, ("off", "auto")):
            live = self.live(policy, share, prefetch)
            found = self.simulated(policy, live["slots"], prefetch)
            visits = live["demand_hits"] + live["prefetch_hits"] + live["misses"]
            yield {
                "policy": policy, "prefetch": prefetch,
                "resident": sum(live["slots"]) / (self.needs["num_layers"] * self.needs["num_experts"]),
                "equal": all(live[name] == getattr(found.counters, name) for name in COUNTERS),
                "live": {name: live[name] for name in ("demand_hits", "prefetch_hits", "misses", "evictions",
                                                       "prefetch_issued", "prefetch_wasted", "tokens_per_s")},
                "simulated": vars(found.counters) | {"tokens_per_s": found.tokens_per_s},
                "points": 100 * (found.hit_ratio - 1 + live["misses"] / visits),
                "error": found.tokens_per_s / live["tokens_per_s"] - 1,
            }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    off = [row for row in rows if row["prefetch"] == "off"]
    on = [row for row in rows if row["prefetch"] == "auto"]
    equal = sum(row["equal"] for row in off)
    yield f"Without prefetch: hits, misses and evictions equal in {equal} of {len(off)}; {_errors(off)}."
    worst = max((abs(row["points"]) for row in on), default=0.0)
    yield f"With prefetch: hit rates at most {worst:.2f} points apart; {_errors(on)}."
    yield ""
    head = "hits live | simulated | points | loads ahead live | simulated | tokens/s live | simulated | error"
    yield f"| resident | policy | prefetch | {head} |"
    yield "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        live, found = row["live"], row["simulated"]
        hits = [one["demand_hits"] + one["prefetch_hits"] for one in (live, found)]
        shares = [f"{count / (count + one['misses']):.2%}" for count, one in zip(hits, (live, found), strict=True)]
        cells = [
            f"{row['resident']:.0%}", row["policy"], row["prefetch"], *shares, f"{row['points']:+.2f}",
            live["prefetch_issued"], found["prefetch_issued"], f"{live['tokens_per_s']:.1f}", f"{found['tokens_per_s']:.1f}",
            f"{row['error']:+.0%}",
        ]  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"


def _errors(rows: list[dict[str, Any]]) -> str:
    errors = sorted(abs(row["error"]) for row in rows)
    return (
        f"tokens/s off by {statistics.median(errors):.0%} in the middle, {errors[-1]:.0%} at most"
        if errors
        else "no runs"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("out", type=Path, help="Markdown with the table; numbers as JSON beside it")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with TemporaryDirectory(prefix="tidegate-simulator-") as folder:
        comparison = Comparison(args.store, args.text, args.tokens, args.repeat, Path(folder))
        if not comparison.machine.is_measured:
            print("the rates are assumed: run tidegate hardware first", file=sys.stderr)
        rows = []
        for row in comparison.rows():
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    text = "\n".join(table(rows))
    print(text)
    args.out.write_text(text + "\n", encoding="utf-8")
    args.out.with_suffix(".json").write_text(json.dumps(rows), encoding="utf-8")
    good = all(
        row["equal"]
        if row["prefetch"] == "off"
        else abs(row["points"]) <= MOST_POINTS and abs(row["error"]) <= MOST_ERROR
        for row in rows
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
