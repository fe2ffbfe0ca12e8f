"""What an analysis means for running the model from disk, in words."""

from __future__ import annotations

from typing import Any


def analysis_verdict(facts: dict[str, Any]) -> list[str]:
    """Sentences, the judgement first. ``facts`` are those of ``analyze``."""
    curves, slots = facts["hit_curves"]["hit_ratio"], facts["hit_curves"]["slots"]
    num_experts, top = facts["num_experts"], facts["num_experts_per_tok"]
    quarter = min(range(len(slots)), key=lambda i: abs(slots[i] - num_experts / 4))
    best = max(
        (name for name in curves if not name.startswith("belady")), key=lambda name: float(curves[name][quarter])
    )
    hit, bound = curves[best][quarter], curves["belady"][quarter]
    misses = (1 - hit) * top
    judgement = (
        "a good candidate" if hit >= 0.65 else "a fair candidate" if hit >= 0.5 else "a poor candidate"
    )  # fmt: skip
    out = [
        f"This model is {judgement} for running from disk: with {slots[quarter]} of {num_experts} experts of a layer in memory, "
        f"{best} finds {hit:.0%} of what a token needs there, so {misses:.2f} experts a layer and token have to be read. "
        f"A policy that knew the future (Belady) would find {bound:.0%}, so a better one than this is worth at most "
        f"{(bound - hit) * top:.2f} reads a layer and token."
    ]
    lag = facts["overlap"]
    if lag["overlap_ratio"]:
        near, chance = lag["overlap_ratio"][0], lag["independent_ratio"]
        far, far_lag = lag["overlap_ratio"][-1], lag["lags_tokens"][-1]
        lasting = (far - chance) / max(near - chance, 1e-9)
        out.append(
            f"Neighbouring tokens share {near:.0%} of their experts; independent draws with the same loads would share "
            f"{chance:.0%}. After {far_lag} tokens it is still {far:.0%}: {max(0.0, lasting):.0%} of the reuse beyond chance "
            "lasts. " + ("Counting uses over the text pays." if lasting > 0.33 else "Recent uses matter most.")
        )
    load = facts["load"]
    out.append(
        f"The busiest quarter of the experts does {load['top_quarter_ratio']:.0%} of the work"
        + (": skewed enough that a fixed set of residents already helps." if load["top_quarter_ratio"] > 0.5 else
           ": too even for a fixed set of residents; the cache has to follow the text.")
    )  # fmt: skip
    kinds = facts["categories"]
    if kinds["own_hit_ratio"] is not None:
        gain = kinds["own_hit_ratio"] - kinds["shared_hit_ratio"]
        dynamic = hit - kinds["own_hit_ratio"]
        out.append(
            f"A fixed set chosen for the kind of text finds {abs(gain) * 100:.1f} points {'more' if gain >= 0 else 'less'} than "
            f"one for all kinds; the dynamic cache, which knows no kinds, finds {abs(dynamic) * 100:.1f} points "
            + ("more than either." if dynamic >= max(0.0, -gain) else "less than that.")
        )
    batch = facts["unions"]
    if len(batch["batches"]) > 1:
        size, distinct = batch["batches"][-1], batch["distinct_experts"][-1]
        out.append(
            f"{size} sequences side by side need {distinct:.1f} experts of a layer instead of {size * top} reads one after the "
            f"other: {size * top / distinct:.1f} uses for each expert loaded."
        )
    steady = facts["stability"]["autocorrelation"]
    if steady is not None:
        out.append(
            f"An expert's use in one window of {facts['stability']['window_tokens']} tokens "
            + (f"says much about the next (correlation {steady:.2f})." if steady > 0.4
               else f"says little about the next (correlation {steady:.2f}).")
        )  # fmt: skip
    return out
