"""``tidegate fit-predictor``: fit a predictor to a trace, and score it on sequences that it was not fitted to."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from tidegate.config import EngineOptions
from tidegate.engine.source import open_store
from tidegate.errors import UsageError
from tidegate.experts.policy import DEFAULT_POLICY, policy_factory
from tidegate.experts.predictor_file import PREDICTORS, save_predictor
from tidegate.experts.trace import TraceReader
from tidegate.sim.fit import fit_predictor
from tidegate.sim.rows import read_rows
from tidegate.sim.score import Score, score_predictor
from tidegate.sim.semantic import token_vectors

KINDS = tuple(PREDICTORS)


def command(
    trace: Annotated[Path, typer.Argument(help="A trace of tidegate trace or run --trace.")],
    kind: Annotated[str, typer.Option(help=f"One of {', '.join(KINDS)}.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The predictor to write.")],
    lookahead: Annotated[int, typer.Option(min=1, max=7, help="Layers before the router speaks.")] = 1,
    horizon: Annotated[int, typer.Option(min=1, max=16, help="Forecast use within this many tokens (window-mlp).")] = 1,
    tokens: Annotated[int | None, typer.Option(min=100, help="Use the first tokens of the trace only.")] = None,
    held_out: Annotated[float, typer.Option(min=0.01, max=0.9, help="Share of the trace that scores.")] = 0.15,
    slots: Annotated[
        int | None, typer.Option(help="Slots a layer of the cache whose misses count; default: a quarter.")
    ] = None,
    policy: Annotated[str, typer.Option(help="That cache's policy.")] = DEFAULT_POLICY,
    score_tokens: Annotated[int, typer.Option(min=1, help="Held-out tokens to score.")] = 1000,
    model: Annotated[str | None, typer.Option(help="The trace's model, for its embedding (semantic).")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same predictor.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Recall counts all used experts; recall on the misses only those that the cache lacked, which are the ones that cost."""
    if kind not in KINDS:
        raise UsageError(f"--kind {kind!r}: choose one of {', '.join(KINDS)}")
    reader = TraceReader(trace)
    capacity = slots or max(1, reader.meta.num_experts // 4)
    if capacity > reader.meta.num_experts:
        raise UsageError(f"--slots {capacity}: the trace has {reader.meta.num_experts} experts a layer")
    rows, scored = read_rows(reader, reader.meta.num_experts, tokens).split(held_out)
    vectors = token_vectors(open_store(model, EngineOptions())) if kind == "semantic" and model else None
    began_s = time.process_time()
    predictor = fit_predictor(kind, rows, lookahead=lookahead, horizon=horizon, seed=seed, vector_VS=vectors)
    fit_s = time.process_time() - began_s
    save_predictor(output, predictor)
    score = score_predictor(
        predictor, scored, policy_factory(policy), capacity, lookahead=lookahead, most_tokens=score_tokens
    )
    facts = {
        "kind": kind, "fitted_tokens": len(rows.token_T), "fit_cpu_s": round(fit_s, 2), "file_bytes": output.stat().st_size,
        "slots": capacity, "policy": policy,
    }  # fmt: skip
    print(json.dumps({**facts, **score.to_json()}) if as_json else _text(facts, score))
    return 0


def _text(facts: dict[str, object], score: Score) -> str:
    lines = [
        f"{facts['kind']}: fitted to {facts['fitted_tokens']:,} tokens in {facts['fit_cpu_s']} s, "
        f"{facts['file_bytes']:,} bytes; scored on {score.tokens:,} others, {score.lookahead} layers ahead",
        f"  misses are those of {facts['slots']} slots a layer, {facts['policy']}",
        "  the m most probable         " + "".join(f"{m:>8}" for m in score.recall),
        "  recall                      " + "".join(f"{v:>8.1%}" for v in score.recall.values()),
        "  recall on the misses        " + "".join(f"{v:>8.1%}" for v in score.miss_recall.values()),
        "  of what they load, wasted   " + "".join(f"{v:>8.1%}" for v in score.wasted.values()),
        f"  precision of the top K {score.precision:.1%}, first guess right {score.top_guess:.1%}, "
        f"calibration error {score.calibration_error:.3f}, {score.predict_us:.1f} us a call",
    ]
    return "\n".join(lines)
