"""``tidegate analyze``: what a trace says about a model's routing, as tables, JSON or a report with plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from tidegate.cli.arguments import Argument, Flag
from tidegate.errors import UsageError
from tidegate.experts.trace import TraceReader
from tidegate.sim.analyze import analyze
from tidegate.terminal import table


def command(
    trace: Annotated[Path, Argument(help="A trace of tidegate trace or run --trace.")],
    report: Annotated[Path | None, Flag(help="Also write plots and one HTML page into this folder.")] = None,
    tokens: Annotated[int, Flag(min=1, help="Look at this many tokens from the start.")] = 20_000,
    curve_tokens: Annotated[int, Flag(min=1, help="Tokens for the hit curves, the slow part.")] = 4_000,
    as_json: Annotated[bool, Flag("--json", help="Print one JSON object.")] = False,
) -> int:
    """Ends with a verdict: whether the model suits running from disk, and why."""
    if report is not None and report.exists() and not report.is_dir():
        raise UsageError(f"--report {report}: is a file; name a folder")
    rows, facts = analyze(TraceReader(trace), tokens, curve_tokens)
    page = None
    if report is not None:
        from tidegate.sim.report import write_report  # noqa: PLC0415  (needs matplotlib)

        page = write_report(report, rows, facts)
        (report / "analysis.json").write_text(json.dumps(facts), encoding="utf-8")
    if as_json:
        print(json.dumps(facts))
    else:
        _print(facts, page)
    return 0


def _print(facts: dict[str, Any], page: Path | None) -> None:
    curves, lag, work = facts["hit_curves"], facts["overlap"], facts["working_set"]
    print(
        f"{facts['source'] or 'trace'}: {facts['tokens']:,} tokens of {facts['sequences']:,} sequences, {facts['num_layers']} "
        f"layers of {facts['num_experts']} experts, top {facts['num_experts_per_tok']}"
    )
    _table(f"hits, first {curves['tokens']:,} tokens", ["slots a layer", *map(str, curves["slots"])],
           [[name, *(f"{v:.1%}" for v in values)] for name, values in curves["hit_ratio"].items()])  # fmt: skip
    _table("reuse", ["tokens later", *map(str, lag["lags_tokens"])],
           [["experts shared", *(f"{v:.1%}" for v in lag["overlap_ratio"])],
            ["independent", *[f"{lag['independent_ratio']:.1%}"] * len(lag["lags_tokens"])]])  # fmt: skip
    _table("working set", ["window, tokens", *map(str, work["windows_tokens"])],
           [["distinct experts", *(f"{v:.1f}" for v in work["distinct_experts"])]])  # fmt: skip
    unions = facts["unions"]
    _table("batch", ["sequences", *map(str, unions["batches"])],
           [["distinct experts", *(f"{v:.1f}" for v in unions["distinct_experts"])],
            ["in a row of one", *(f"{v:.1f}" for v in unions["distinct_experts_in_a_row"])]])  # fmt: skip
    load, steady = facts["load"], facts["stability"]
    _table("by layer", ["layer", "busiest quarter", "entropy", "shared with next", "window correlation"],
           _layer_rows(load, lag, steady))  # fmt: skip
    for sentence in facts["verdict"]:
        print(sentence)
    if page is not None:
        print(f"report: {page}")


def _layer_rows(load: dict[str, Any], lag: dict[str, Any], steady: dict[str, Any]) -> list[list[str]]:
    correlation = steady.get("autocorrelation_per_layer")
    shared = lag["lag1_ratio_per_layer"]
    return [
        [str(layer), f"{top:.1%}", f"{entropy:.2f}", f"{shared[layer]:.1%}" if shared else "",
         f"{correlation[layer]:.2f}" if correlation else ""]
        for layer, (top, entropy) in enumerate(
            zip(load["top_quarter_ratio_per_layer"], load["entropy_ratio_per_layer"], strict=True)
        )
    ]  # fmt: skip


def _table(title: str, head: list[str], rows: list[list[str]]) -> None:
    print(table(head, rows, title))
