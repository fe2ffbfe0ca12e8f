"""``tidegate fit-predictor``: fit a predictor of routing to a model's texts or to a trace; score it on text that it was not
fitted to."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

from tidegate.cli.arguments import Argument, Flag
from tidegate.cli.files import check_output, read_utf8
from tidegate.cli.options import flags
from tidegate.cli.progress import converting, counted
from tidegate.config import EngineOptions
from tidegate.engine.source import open_store
from tidegate.errors import UsageError
from tidegate.experts.policy import DEFAULT_POLICY, policy_factory
from tidegate.experts.predictor_file import PREDICTORS, save_predictor
from tidegate.experts.trace import TraceReader
from tidegate.sim.fit import fit_predictor
from tidegate.sim.fit_gates import Recall
from tidegate.sim.rows import read_rows
from tidegate.sim.score import Score, score_predictor
from tidegate.sim.semantic import token_vectors

KINDS = tuple(PREDICTORS)
_TRACE = "With --kind"


@flags({"Model and memory": EngineOptions}, without=("sequences", "policy", "prefetch", "predictor"))
def command(
    model: Annotated[str, Argument(help="A model, as in tidegate run; with --kind a trace.")],
    texts: Annotated[list[Path] | None, Argument(help="Text files like those the model will work on.")] = None,
    output: Annotated[
        Path | None, Flag("--output", "-o", help="The predictor to write; default: where the engine finds it.")
    ] = None,
    tokens: Annotated[int | None, Flag(min=100, help="Read so many tokens; default: up to 32,768.")] = None,
    held_out: Annotated[float, Flag(min=0.01, max=0.9, help="Share of the text that scores.")] = 0.15,
    kind: Annotated[
        str | None, Flag(help=f"Fit one of these to a trace, for --predictor: {', '.join(KINDS)}.", group=_TRACE)
    ] = None,
    lookahead: Annotated[int, Flag(min=1, max=7, help="Layers before the router speaks.", group=_TRACE)] = 1,
    horizon: Annotated[
        int,
        Flag(min=1, max=16, help="Forecast use within this many tokens (window-mlp).", group=_TRACE),
    ] = 1,
    slots: Annotated[
        int | None,
        Flag(help="Slots a layer of the cache whose misses count; default: a quarter.", group=_TRACE),
    ] = None,
    policy: Annotated[str, Flag(help="That cache's policy.", group=_TRACE)] = DEFAULT_POLICY,
    score_tokens: Annotated[int, Flag(min=1, help="Held-out tokens to score.", group=_TRACE)] = 1000,
    embedding: Annotated[
        str | None, Flag(help="The trace's model, for its embedding (semantic).", group=_TRACE)
    ] = None,
    seed: Annotated[int, Flag(help="Same seed, same predictor.", group=_TRACE)] = 0,
    as_json: Annotated[bool, Flag("--json", help="Print one JSON object.")] = False,
    **options: Any,
) -> int:
    """Reads the texts, and fits what tells from the state of one layer which experts the next ones will choose. It is kept beside
    the model and used from then on. Recall counts all used experts; recall on the misses only those that a cache of a quarter of
    the experts lacked, which are the ones that cost."""
    if output is not None:
        check_output(output, "--output")
    if kind is None:
        _fit_model(model, texts or [], output, tokens, held_out, as_json, options)
        return 0
    if kind not in KINDS:
        raise UsageError(f"--kind {kind!r}: choose one of {', '.join(KINDS)}")
    if texts or options or output is None:
        raise UsageError("with --kind give a trace and -o, no texts and no options of a model")
    reader = TraceReader(Path(model))
    capacity = slots or max(1, reader.meta.num_experts // 4)
    if capacity > reader.meta.num_experts:
        raise UsageError(f"--slots {capacity}: the trace has {reader.meta.num_experts} experts a layer")
    rows, scored = read_rows(reader, reader.meta.num_experts, tokens).split(held_out)
    vectors = token_vectors(open_store(embedding, EngineOptions())) if kind == "semantic" and embedding else None
    began_s = time.process_time()
    predictor = fit_predictor(kind, rows, lookahead=lookahead, horizon=horizon, seed=seed, vector_VS=vectors)
    fit_s = time.process_time() - began_s
    save_predictor(output, predictor, reader.meta.fingerprint)
    score = score_predictor(
        predictor, scored, policy_factory(policy), capacity, lookahead=lookahead, most_tokens=score_tokens
    )
    facts = {
        "kind": kind, "fitted_tokens": len(rows.token_T), "fit_cpu_s": round(fit_s, 2), "file_bytes": output.stat().st_size,
        "slots": capacity, "policy": policy,
    }  # fmt: skip
    print(json.dumps({**facts, **score.to_json()}) if as_json else _text(facts, score))
    return 0


def _fit_model(
    path: str,
    texts: list[Path],
    output: Path | None,
    tokens: int | None,
    held_out: float,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    from tidegate.engine.fit_predictor import fit_model  # noqa: PLC0415  (a trace needs no engine)
    from tidegate.engine.model import load  # noqa: PLC0415

    if not texts:
        raise UsageError("give at least one text file; or --kind for a trace")
    contents = [read_utf8(text) for text in texts]
    began_s = time.process_time()
    with converting(path) as progress:
        loaded = load(path, progress=progress, prefetch="off", **options)
    with loaded:
        ids = [loaded.encode(content) for content in contents]
        with counted("tokens read") as progress:
            fit = fit_model(loaded, ids, output=output, tokens=tokens, held_out_ratio=held_out, progress=progress)
    spent_s = round(time.process_time() - began_s, 2)
    if as_json:
        print(json.dumps({**fit.to_json(), "cpu_s": spent_s}))
        return
    print(
        f"{fit.path}: {fit.file_bytes:,} bytes, fitted to {fit.fitted_tokens:,} tokens in {spent_s} s of processor time"
    )
    print(_recall_text(fit.recall, fit.held_out_tokens))


def _recall_text(recall: Recall, tokens: int) -> str:
    lines = [
        f"  recall on {tokens:,} other tokens   the routers alone   fitted   misses of {recall.slots} slots: alone   fitted"
    ]
    columns = (recall.own, recall.fitted, recall.own_misses, recall.fitted_misses)
    when_asked = ("at the layer's start", "a layer ahead")
    for when, own, fitted, own_misses, fitted_misses in zip(when_asked, *columns, strict=True):
        lines.append(f"  {when:24}{own:>22.1%}{fitted:>9.1%}{own_misses:>29.1%}{fitted_misses:>9.1%}")
    lines.append(f"  the first layer, from the token alone{'':>17}{recall.embedded:>9.1%}")
    return "\n".join(lines)


def _text(facts: dict[str, object], score: Score) -> str:
    layers = "1 layer" if score.lookahead == 1 else f"{score.lookahead} layers"
    lines = [
        f"{facts['kind']}: fitted to {facts['fitted_tokens']:,} tokens in {facts['fit_cpu_s']} s, "
        f"{facts['file_bytes']:,} bytes; scored on {score.tokens:,} others, {layers} ahead",
        f"  misses are those of {facts['slots']} slots a layer, {facts['policy']}",
        "  the m most probable         " + "".join(f"{m:>8}" for m in score.recall),
        "  recall                      " + "".join(f"{v:>8.1%}" for v in score.recall.values()),
        "  recall on the misses        " + "".join(f"{v:>8.1%}" for v in score.miss_recall.values()),
        "  of what they load, wasted   " + "".join(f"{v:>8.1%}" for v in score.wasted.values()),
        f"  precision of the top K {score.precision:.1%}, first guess right {score.top_guess:.1%}, "
        f"calibration error {score.calibration_error:.3f}, {score.predict_us:.1f} us a call",
    ]
    return "\n".join(lines)
