"""The questions of docs/experiments.md again, on another model: its section between the marks there is made by this.

    python benchmarks/builtin_experiments.py STORE TEXTS [--page docs/experiments.md] [--work FOLDER] [--tokens 5000]

TEXTS is a folder: one *.txt, or one *.heldout.jsonl of `tidegate train`'s corpus, a kind of text. Records a trace with sketches,
fits every predictor, scores and simulates them, and writes the section: a few minutes, nothing in it is wall time. Without --page
the section goes to standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import routing_experiments as routing
from routing_experiments import Bench, markdown, percent

from tidegate.cli import main as tidegate
from tidegate.experts.trace import TraceReader
from tidegate.sim.analyze import analyze

BEGIN, END = "<!-- built-in model: made by benchmarks/builtin_experiments.py -->", "<!-- end -->"
KINDS = (
    "last-token",
    "window",
    "decayed",
    "token-table",
    "markov",
    "groups",
    "lstm",
    "window-mlp",
    "mlp",
    "semantic",
    "next-gate",
)
FITS = [
    *((kind, kind, 1) for kind in KINDS), ("mlp2", "mlp", 2), ("mlp3", "mlp", 3), ("next-gate2", "next-gate", 2),
]  # fmt: skip
CHARACTERS_PER_TOKEN = 4
SHOWN = (
    routing.policies, routing.half_lives, routing.predictors, routing.thresholds, routing.staging, routing.bits, routing.batches,
)  # fmt: skip


def texts(folder: Path, into: Path, tokens: int) -> list[Path]:
    """Text files of about that many tokens each."""
    out = []
    for source in sorted([*folder.glob("*.txt"), *folder.glob("*.heldout.jsonl")]):
        lines = source.read_text(encoding="utf-8").splitlines(keepends=source.suffix == ".txt")
        parts = lines if source.suffix == ".txt" else [json.loads(line)["text"] + "\n\n" for line in lines]
        out.append(into / f"{source.name.split('.')[0]}.txt")
        out[-1].write_text("".join(parts)[: tokens * CHARACTERS_PER_TOKEN], encoding="utf-8")
    if not out:
        raise SystemExit(f"{folder}: neither *.txt nor *.heldout.jsonl")
    return out


def command(*arguments: object) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = tidegate([*map(str, arguments)])
    if code:
        raise SystemExit(f"tidegate {arguments[0]} ended with {code}")
    return out.getvalue()


def fit(trace: Path, store: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Scores by name; the predictors are in the folder."""
    found = {}
    for name, kind, ahead in FITS:
        where = folder / f"{name}.npz"
        flags = ("--lookahead", ahead, "--embedding", store, "--score-tokens", 600, "--json")
        found[name] = json.loads(command("fit-predictor", trace, "--kind", kind, "-o", where, *flags))
        print(name, found[name]["recall"], file=sys.stderr, flush=True)
    return found


def score_table(scores: dict[str, dict[str, Any]]) -> str:
    head = ["predictor", "recall@4", "recall@8", "first guess right", "on misses: @1", "@2", "@4", "wasted @1", "@2",
            "calibration error", "us a call", "bytes", "fit, CPU s"]  # fmt: skip
    rows = [
        [name + ("" if one["lookahead"] == 1 else f" ({one['lookahead']} layers ahead)"),
         *(percent(one["recall"][m]) for m in ("4", "8")), percent(one["top_guess"]),
         *(percent(one["miss_recall"][m]) for m in ("1", "2", "4")), *(percent(one["wasted"][m]) for m in ("1", "2")),
         f"{one['calibration_error']:.3f}", f"{one['predict_us']:.0f}", f"{one['file_bytes']:,}", f"{one['fit_cpu_s']:.1f}"]
        for name, one in scores.items()
    ]  # fmt: skip
    return markdown(head, rows)


def comparison(facts: dict[str, Any], scores: dict[str, dict[str, Any]], tables: dict[str, list[list[Any]]]) -> str:
    """What the page says of gpt-oss-20b, and the same numbers here."""
    hits = {row[0]: [float(cell) for cell in row[1:]] for row in tables["policies"]}
    at_8 = {name: values[2] for name, values in hits.items()}
    best = max(value for name, value in at_8.items() if not name.startswith("belady"))
    lag, kinds = facts["overlap"], facts["categories"]
    speed = {row[0]: row for row in tables["predictors"]}
    width = {row[0]: row for row in tables["bits"]}
    fixed = 100 * kinds["shared_hit_ratio"]
    own = 100 * kinds["own_hit_ratio"]
    curve = 100 * facts["hit_curves"]["hit_ratio"]["decayed-lfu"][facts["hit_curves"]["slots"].index(8)]
    rows = [
        ["hits at 8 of 32 slots, %: decayed LFU, LRU, LFU", "68.4, 64.9, 67.7",
         ", ".join(f"{at_8[name]:.1f}" for name in ("decayed-lfu", "lru", "lfu"))],
        ["Belady (forced) over the best policy, points", "+8.6", f"{at_8['belady'] - best:+.1f}"],
        ["half of the slots pinned by heat and steadiness, points", "-1.7", f"{at_8['resident-set'] - at_8['decayed-lfu']:+.1f}"],
        ["experts shared by neighbours, and by chance, %", "43, 20",
         f"{100 * lag['overlap_ratio'][0]:.0f}, {100 * lag['independent_ratio']:.0f}"],
        [f"reuse beyond chance that is left after {lag['lags_tokens'][-1]} tokens", "about half (256 tokens)",
         f"{(lag['overlap_ratio'][-1] - lag['independent_ratio']) / (lag['overlap_ratio'][0] - lag['independent_ratio']):.0%}"],
        ["work of the busiest quarter, %", "51", f"{100 * facts['load']['top_quarter_ratio']:.0f}"],
        ["a fixed quarter, the same by kind of text, dynamic, %", "52, 57, 69", f"{fixed:.0f}, {own:.0f}, {curve:.0f}"],
        ["last token: recall@4, recall on the misses @1, %", "43, 4", _pair(scores["last-token"])],
        ["groups: recall@4, recall on the misses @1, %", "24, 6", _pair(scores["groups"])],
        ["mlp: recall@4, recall on the misses @1, %", "79, 47", _pair(scores["mlp"])],
        ["mlp, two more layers ahead: recall@4 lost, points", "-2.5", f"{_recall(scores['mlp3']) - _recall(scores['mlp']):+.1f}"],
        ["mlp with the semantic class: recall@4 gained, points", "not known",
         f"{_recall(scores['semantic']) - _recall(scores['mlp']):+.1f}"],
        ["next gate on sketches: recall@4, on the misses @1, %", "not known", _pair(scores["next-gate"])],
        ["prefetch by the mlp, R = 0.25, 1, 5", "1.04, 1.12, 0.97", _speeds(speed["mlp"][1:4])],
        ["the engine's own prefetch, R = 0.25, 1, 5", "not known", _speeds(speed["gates"][1:4])],
        ["a perfect predictor, R = 0.25, 1, 5", "1.08, 1.33, 1.08", _speeds(speed["oracle"][1:4])],
        ["2 bits at equal memory, R = 0.25, 1, 5", "1.37, 2.04, 3.43", _speeds(width["2 bits, 14 slots"][1:6:2])],
    ]  # fmt: skip
    return markdown(["", "gpt-oss-20b", "here"], rows)


def _speeds(cells: list[Any]) -> str:
    return ", ".join(str(cell).split()[0] for cell in cells)


def _recall(score: dict[str, Any]) -> float:
    return 100 * float(score["recall"]["4"])


def _pair(score: dict[str, Any]) -> str:
    return f"{_recall(score):.0f}, {100 * score['miss_recall']['1']:.0f}"


def section(store: Path, folder: Path, work: Path, tokens: int, steps: int) -> str:
    trace = work / "model.trace"
    command("trace", store, *texts(folder, work, tokens), "-o", trace, "--context", 257, "--sketch", 64)
    scores = fit(trace, store, work)
    rows, facts = analyze(TraceReader(trace), None, 2000)
    bench = Bench(trace, work, steps)
    titles, tables = {}, {}
    for experiment in SHOWN:
        name = experiment.__name__
        titles[name], head, tables[name] = experiment(bench)
        titles[name] = f"{titles[name][0].upper()}{titles[name][1:]}.\n\n{markdown(head, tables[name])}"
        print(titles[name], file=sys.stderr, flush=True)
    meta = bench.reader.meta
    kinds = ", ".join(facts["categories"]["kinds"])
    return "\n\n".join(
        [
            f"{meta.num_layers} layers, {meta.num_experts} experts, top {meta.num_experts_per_tok}; {len(rows.token_T):,} tokens "
            f"of held-out text ({kinds}), read in pieces of 256 tokens, the kinds in turn; simulated on {len(bench.steps)} "
            "that nothing was fitted to.",
            comparison(facts, scores, tables),
            "Prediction, as above.",
            score_table(scores),
            *titles.values(),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--work", type=Path, help="keep trace and predictors here")
    parser.add_argument("--tokens", type=int, default=5000, help="of each kind of text, about")
    parser.add_argument("--steps", type=int, default=600, help="tokens that are simulated")
    args = parser.parse_args()
    with TemporaryDirectory(prefix="tidegate-experiments-") as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        text = section(args.store, args.texts, work, args.tokens, args.steps)
    if args.page is None:
        print(text)
        return
    before, rest = args.page.read_text(encoding="utf-8").split(BEGIN)
    args.page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
