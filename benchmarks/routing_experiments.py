"""The tables and plots of docs/experiments.md, from a trace and the simulator.

    tidegate trace shared/traces/gpt-oss-20b/trace.npz -o gpt-oss.trace --num-experts 32
    tidegate fit-predictor gpt-oss.trace --kind mlp -o FIT/mlp.npz          (and the other kinds; mlp2, mlp3: --lookahead 2, 3)
    python benchmarks/routing_experiments.py gpt-oss.trace FIT OUT [--steps 1500] [--only NAME]

Simulated on the end of the trace, which the predictors were not fitted to. A layer computes for 1 ms, half of it its routed
experts; an expert is 4 MiB and takes R ms to load. tokens/s are therefore relative: compare them within a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

from tidegate.experts.policy import POLICIES, DecayedLfu, PolicyFactory
from tidegate.experts.predictor_file import find_predictor
from tidegate.experts.trace import TraceChunk, TraceReader
from tidegate.sim.ahead import Foresight, Gates
from tidegate.sim.batching import batched
from tidegate.sim.belady import belady_hits
from tidegate.sim.oracle import Oracle
from tidegate.sim.prefetcher import PrefetchOptions
from tidegate.sim.replay import Step
from tidegate.sim.simulate import Outcome, Profile, simulate

HELD_OUT_RATIO = 0.15
HALF = PrefetchOptions(2, 0.5)
RATIOS = (0.25, 0.5, 1.0, 2.0, 5.0)
MIB = 1 << 20
Table = tuple[str, list[str], list[list[Any]]]


class Bench:
    """Held-out tokens of a trace, one a step, and one call to simulate them. The sequences that are held out are those that
    `fit-predictor` does not fit to."""

    def __init__(self, trace: Path, fitted: Path, num_steps: int) -> None:
        self.reader, self.fitted, self.num_steps = TraceReader(trace), fitted, num_steps
        pieces = chunks_by_sequence(list(self.reader))
        ends = list(accumulate(len(piece.step) for piece in pieces))
        cut = next(index for index, end in enumerate(ends) if end > (1 - HELD_OUT_RATIO) * ends[-1])
        self.held_out: list[TraceChunk] = [p for p in pieces[cut:] if p.sequence[0] != pieces[cut - 1].sequence[0]]
        self.steps = list(islice(batched(self.held_out, 1), num_steps))
        self.layers, self.experts = self.reader.meta.num_layers, self.reader.meta.num_experts

    def run(
        self, slots: int, load_ratio: float, *, policy: str | PolicyFactory = "decayed-lfu", predictor: str = "none",
        options: PrefetchOptions = HALF, bits: int = 4, predict_us: float = 20.0, steps: list[Step] | None = None,
        **oracle: float,
    ) -> Outcome:  # fmt: skip
        """``predictor``: none, oracle, gates, an unfitted kind, or the name of a file in the folder of fitted ones."""
        size = (bits + 0.5) / 4.5
        profile = Profile(
            round(4 * MIB * size), 4 * MIB / (load_ratio * 1e-3), expert_s=0.5e-3 / 4 * size, dense_s=0.5e-3,
            predict_s=0.0 if predictor == "oracle" else predict_us * 1e-6,
        )  # fmt: skip
        make = POLICIES[policy] if isinstance(policy, str) else policy
        return simulate(
            self.steps if steps is None else steps, [slots] * self.layers, self.experts, make, profile,
            self.predictor(predictor, **oracle), options,
        )  # fmt: skip

    def predictor(self, name: str, **oracle: float) -> Foresight | None:
        if name == "gates":
            return Gates(self.reader.meta.guess_curves)
        if name == "oracle":
            return Oracle(self.layers, self.experts, **oracle)
        if name == "none":
            return None
        path = self.fitted / f"{name}.npz"
        return find_predictor(str(path) if path.exists() else name, self.layers, self.experts).load()


def policies(bench: Bench) -> Table:
    """LFU or LRU; pinned against dynamic."""
    slots = [4, 6, 8, 12, 16, 20, 24]
    rows: list[list[Any]] = []
    for name in POLICIES:
        rows.append([name, *(percent(bench.run(c, 1.0, policy=name).hit_ratio) for c in slots)])
    visits = sum(len(needed) for step in bench.steps for needed in step.needed_L)
    events = list(zip(*(step.needed_L for step in bench.steps), strict=True))
    for name, bypass in (("belady", False), ("belady-bypass", True)):
        hits = [sum(belady_hits(e, c, bench.experts, bypass=bypass) for e in events) for c in slots]
        rows.append([name, *(percent(h / visits) for h in hits)])
    return "hit rate, %, by slots of 32", ["policy", *map(str, slots)], rows


def half_lives(bench: Bench) -> Table:
    """The memory of decayed LFU."""
    lives = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    rows = [
        [f"{slots} slots", *(percent(bench.run(slots, 1.0, policy=_decayed(life)).hit_ratio) for life in lives)]
        for slots in (8, 16)
    ]
    return "hit rate, %, by half-life in tokens", ["", *map(str, lives)], rows


def _decayed(half_life: float) -> PolicyFactory:
    return lambda num_experts: DecayedLfu(num_experts, half_life)


def accuracy(bench: Bench) -> Table:
    """How many slots a given accuracy of prefetch is worth: slots without prefetch that reach the same speed."""
    plain = {ratio: [bench.run(c, ratio).tokens_per_s for c in range(8, 25)] for ratio in RATIOS}
    rows = []
    for recall, waste in ((1.0, 0.0), (0.9, 0.1), (0.8, 0.25), (0.6, 0.4), (0.4, 0.6)):
        cells: list[Any] = [f"{recall:.0%}, {waste:.0%}"]
        for ratio in RATIOS:
            speed = bench.run(8, ratio, predictor="oracle", recall=recall, waste=waste).tokens_per_s
            cells.append(f"{speed / plain[ratio][0]:.2f} ({_same_speed(plain[ratio], speed)})")
        rows.append(cells)
    return (
        "speed-up at 8 slots (slots that reach it without prefetch), by R",
        ["recall, waste", *map(str, RATIOS)],
        rows,
    )


def _same_speed(speeds: list[float], wanted: float) -> str:
    if wanted < speeds[0]:
        return "< 8"
    for index, (low, high) in enumerate(pairwise(speeds)):
        if wanted <= high:
            return f"{8 + index + (wanted - low) / max(high - low, 1e-9):.1f}"
    return "> 24"


def staging(bench: Bench) -> Table:
    """Double, triple, quadruple staging, with a perfect and a learned predictor."""
    rows = []
    for name, fitted in (("perfect", ["oracle"] * 3), ("mlp", ["mlp", "mlp2", "mlp3"])):
        for depth, predictor in zip((2, 3, 4), fitted, strict=True):
            cells: list[Any] = [f"{name}, {depth} layers in work"]
            for ratio in RATIOS:
                base = bench.run(8, ratio)
                cells.append(_gain(bench.run(8, ratio, predictor=predictor, options=PrefetchOptions(depth, 0.5)), base))
            rows.append(cells)
    return "speed-up (bytes) over demand loads, 8 slots, by R", ["", *map(str, RATIOS)], rows


def thresholds(bench: Bench) -> Table:
    """The probability above which a load pays, by R."""
    limits = (0.1, 0.3, 0.5, 0.7, 0.9)
    rows = []
    for ratio in RATIOS:
        base = bench.run(8, ratio)
        runs = [bench.run(8, ratio, predictor="mlp", options=PrefetchOptions(2, limit)) for limit in limits]
        rows.append([f"R = {ratio}", *(_gain(run, base) for run in runs)])
    return "speed-up (bytes) over demand loads, mlp, 8 slots, by threshold", ["", *map(str, limits)], rows


def predictors(bench: Bench) -> Table:
    """Every predictor in the simulator, group prefetch among them."""
    rows = []
    names = ["last-token", "window", "decayed", "token-table", "markov", "groups", "lstm", "window-mlp", "mlp"]
    names += [name for name in ("semantic", "next-gate") if (bench.fitted / f"{name}.npz").exists()]
    for name in [*names, *(["gates"] if bench.reader.meta.guess_reach else []), "oracle"]:
        cells: list[Any] = [name]
        for ratio in (0.25, 1.0, 5.0):
            base = bench.run(8, ratio)
            run = bench.run(8, ratio, predictor=name, options=PrefetchOptions(2, 0.5))
            cells.append(_gain(run, base))
        counters = run.counters
        cells += [counters.prefetch_issued, percent(counters.prefetch_hits / max(1, counters.prefetch_issued))]
        rows.append(cells)
    return (
        "speed-up (bytes) over demand loads, 8 slots, threshold 0.5",
        ["predictor", "R = 0.25", "R = 1", "R = 5", "issued", "useful, %"],
        rows,
    )


def fixed_count(bench: Bench) -> Table:
    """Prefetch of the two most probable absent experts of the next layer, however probable: group prefetch as published."""
    rows = []
    for name in ("groups", "last-token", "decayed", "markov", "mlp"):
        cells: list[Any] = [name]
        for ratio in (0.25, 1.0, 5.0):
            run = bench.run(8, ratio, predictor=name, options=PrefetchOptions(2, 0.0, 2))
            cells.append(_gain(run, bench.run(8, ratio)))
        counters = run.counters
        rows.append([*cells, percent(counters.prefetch_hits / max(1, counters.prefetch_issued))])
    head = ["predictor", "R = 0.25", "R = 1", "R = 5", "useful, %"]
    return "always two loads a layer: speed-up (bytes) over demand loads, 8 slots", head, rows


def predictor_cost(bench: Bench) -> Table:
    """What a prediction may cost. A layer computes for 1,000 us."""
    costs = (0, 20, 50, 100, 200)
    rows = []
    for ratio in (0.25, 1.0, 5.0):
        base = bench.run(8, ratio)
        runs = [bench.run(8, ratio, predictor="mlp", predict_us=cost) for cost in costs]
        rows.append([f"R = {ratio}", *(f"{run.tokens_per_s / base.tokens_per_s:.2f}" for run in runs)])
    return "speed-up over demand loads, mlp, by microseconds a prediction", ["", *map(str, costs)], rows


def bits(bench: Bench) -> Table:
    """Bits against hits against prefetch at equal memory: 8 slots of 4-bit experts. Speed over that with demand loads."""
    rows = []
    for width, slots in ((8, 4), (4, 8), (3, 10), (2, 14)):
        for predictor in ("none", "mlp"):
            cells: list[Any] = [f"{width} bits, {slots} slots" + ("" if predictor == "none" else ", mlp prefetch")]
            for ratio in RATIOS:
                run = bench.run(slots, ratio, bits=width, predictor=predictor)
                cells.append(f"{run.tokens_per_s / bench.run(8, ratio).tokens_per_s:.2f}")
            rows.append([*cells, percent(run.hit_ratio)])
    best = [f"{bench.run(8, r, policy='decayed-lfu').tokens_per_s / bench.run(8, r, policy='lru').tokens_per_s:.2f}"
            for r in RATIOS]  # fmt: skip
    rows.append(["(decayed LFU over LRU)", *best, ""])
    return "speed at equal memory, by R", ["", *map(str, RATIOS), "hits, % at R = 5"], rows


def batches(bench: Bench) -> Table:
    """Sequences side by side, in order of arrival and grouped by kind of text."""
    names = bench.reader.categories
    chunks = bench.held_out
    grouped = sorted(chunks_by_sequence(chunks), key=lambda one: names.get(int(one.sequence[0]), ""))
    spread = chunks_by_sequence(chunks)
    spread = [spread[i] for start in range(16) for i in range(start, len(spread), 16)]
    rows = []
    for batch in (1, 2, 4, 8, 16):
        cells: list[Any] = [batch]
        for order in (grouped, spread):
            steps = list(zip(range(max(1, bench.num_steps // batch)), batched(order, batch), strict=False))
            run = bench.run(8, 1.0, steps=[step for _, step in steps])
            cells += [f"{run.tokens_per_s:.1f}", f"{run.bytes_per_token / MIB:.0f}", percent(run.hit_ratio)]
        rows.append(cells)
    return (
        "8 slots, R = 1: tokens/s, MiB a token, hits % - kinds of text together, then mixed",
        ["batch", "tokens/s", "MiB", "hits", "mixed: tokens/s", "MiB", "hits"],
        rows,
    )


def chunks_by_sequence(chunks: list[TraceChunk]) -> list[TraceChunk]:
    """One chunk a piece of a sequence, in order."""
    out = []
    for chunk in chunks:
        cuts = [
            0,
            *(i for i in range(1, len(chunk.step)) if chunk.sequence[i] != chunk.sequence[i - 1]),
            len(chunk.step),
        ]
        for start, stop in pairwise(cuts):
            out.append(TraceChunk(**{name: values[start:stop] for name, values in vars(chunk).items()}))
    return out


def _gain(run: Outcome, base: Outcome) -> str:
    return f"{run.tokens_per_s / base.tokens_per_s:.2f} ({run.bytes_per_token / base.bytes_per_token - 1:+.0%})"


def percent(ratio: float) -> str:
    return f"{100 * ratio:.1f}"


def markdown(head: list[str], rows: list[list[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


EXPERIMENTS: tuple[Callable[[Bench], Table], ...] = (
    policies, half_lives, predictors, fixed_count, thresholds, staging, accuracy, predictor_cost, bits, batches,
)  # fmt: skip


def plot_speed(out: Path) -> None:
    """What each means buys by R, from the tables of ``staging`` and ``bits``: OUT/speed.png."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an optional extra)

    lines = {}
    for name, label in (("staging", "perfect, 2"), ("staging", "mlp, 2"), ("bits", "(decayed"), ("bits", "3 bits, 10 slots"),
                        ("bits", "2 bits, 14 slots")):  # fmt: skip
        rows = json.loads((out / f"{name}.json").read_text())["rows"]
        row = next(row for row in rows if row[0].startswith(label))
        lines[row[0].strip("()")] = [float(str(cell).split()[0]) for cell in row[1 : 1 + len(RATIOS)]]
    figure = Figure(figsize=(7.6, 3.8), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for label, values in lines.items():
        axes.plot(RATIOS, values, marker="o", label=label)
    axes.axhline(1, color="#777", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(RATIOS, [f"{ratio:g}" for ratio in RATIOS])
    axes.set_yticks([1, 1.5, 2, 3], ["1", "1.5", "2", "3"])
    axes.minorticks_off()
    axes.set_xlabel("R: time to load an expert / time to compute a layer")
    axes.set_ylabel("speed-up")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(out / "speed.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("fitted", type=Path, help="folder of fitted predictors")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--only", help="name of one experiment")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.trace, options.fitted, options.steps)
    for experiment in EXPERIMENTS:
        name = experiment.__name__
        if options.only in (None, name):
            title, head, rows = experiment(bench)
            text = f"### {title}\n\n{markdown(head, rows)}"
            (options.out / f"{name}.md").write_text(text + "\n", encoding="utf-8")
            (options.out / f"{name}.json").write_text(json.dumps({"title": title, "head": head, "rows": rows}))
            print(text, flush=True)
    if options.only is None:
        plot_speed(options.out)


if __name__ == "__main__":
    main()
