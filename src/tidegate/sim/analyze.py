"""All of an analysis as one dictionary, ready for JSON."""

from __future__ import annotations

from typing import Any

from tidegate.experts.trace import TraceReader
from tidegate.sim import analysis
from tidegate.sim.rows import Rows, read_rows
from tidegate.sim.verdict import analysis_verdict


def analyze(reader: TraceReader, most_tokens: int | None, curve_tokens: int) -> tuple[Rows, dict[str, Any]]:
    """Statistics over the first ``most_tokens``, hit curves over the first ``curve_tokens``. Raises UsageError for a trace
    without tokens."""
    meta = reader.meta
    rows = read_rows(reader, meta.num_experts, most_tokens)
    facts: dict[str, Any] = {
        "source": meta.source, "tokens": len(rows.token_T), "sequences": len(rows.ids), "num_layers": meta.num_layers,
        "num_experts": meta.num_experts, "num_experts_per_tok": meta.num_experts_per_tok,
        "load": analysis.load(rows), "overlap": analysis.overlap(rows), "working_set": analysis.working_set(rows),
        "stability": analysis.stability(rows), "pairs": analysis.pairs(rows),
        "categories": analysis.categories(rows, reader.categories), "unions": analysis.unions(rows),
        "hit_curves": analysis.hit_curves(rows, curve_tokens),
    }  # fmt: skip
    facts["verdict"] = analysis_verdict(facts)
    return rows, facts
