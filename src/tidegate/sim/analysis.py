"""What a trace says about a model's routing: the numbers behind ``tidegate analyze``.

Every function returns plain numbers and lists, ready for JSON. Legend: T rows, L MoE layers, E experts of a layer, K experts per
token, W windows.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from tidegate.experts.base import InstantLoader
from tidegate.experts.cache import ExpertCache
from tidegate.experts.policy import POLICIES
from tidegate.sim.belady import belady_hits
from tidegate.sim.groups import co_activation, grouped, lift
from tidegate.sim.rows import Array, Rows

LAGS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BATCHES = (1, 2, 4, 8, 16, 32)
STABILITY_TOKENS = 64
CURVE_LAYERS = 8


def load(rows: Rows) -> dict[str, Any]:
    """How evenly experts are used. ``uses_LE`` sums to K in every layer when divided by the tokens; entropy is over that of equal
    use."""
    share_LE = _share(rows)
    quarter = max(1, rows.num_experts // 4)
    top_L = np.sort(share_LE, axis=1)[:, -quarter:].sum(axis=1) / rows.num_experts_per_tok
    part_LE = share_LE / rows.num_experts_per_tok
    logs = np.log(part_LE, out=np.zeros_like(part_LE), where=part_LE > 0)
    entropy_L = (
        -(part_LE * logs).sum(axis=1) / np.log(rows.num_experts) if rows.num_experts > 1 else np.ones(len(share_LE))
    )
    return {
        "use_ratio_per_layer": share_LE.round(5).tolist(),
        "top_quarter_ratio_per_layer": top_L.round(4).tolist(),
        "top_quarter_ratio": round(float(top_L.mean()), 4),
        "entropy_ratio_per_layer": entropy_L.round(4).tolist(),
        "entropy_ratio": round(float(entropy_L.mean()), 4),
        "unused_experts": int((share_LE == 0).sum()),
    }


def overlap(rows: Rows) -> dict[str, Any]:
    """Share of a token's experts that the token ``lag`` later (same sequence, same layer) uses again, and what independent
    draws with the same loads would share."""
    hot = rows.hot()
    sequence_T = np.repeat(np.arange(len(rows.ids)), np.diff(rows.offsets))
    top = rows.num_experts_per_tok
    lags, seen, by_layer = [], [], []
    for lag in LAGS:
        same_T = sequence_T[lag:] == sequence_T[:-lag]
        if not same_T.any():
            break
        shared_TL = (hot[lag:][same_T] & hot[:-lag][same_T]).sum(axis=2)
        lags.append(lag)
        by_layer.append(shared_TL.mean(axis=0) / top)
        seen.append(round(float(by_layer[-1].mean()), 4))
    independent_L = (_share(rows) ** 2).sum(axis=1) / top
    return {
        "lags_tokens": lags,
        "overlap_ratio": seen,
        "independent_ratio": round(float(independent_L.mean()), 4),
        "lag1_ratio_per_layer": by_layer[0].round(4).tolist() if by_layer else [],
        "independent_ratio_per_layer": independent_L.round(4).tolist(),
    }


def working_set(rows: Rows) -> dict[str, Any]:
    """Mean number of distinct experts that a layer uses within a window of a sequence, windows side by side."""
    hot = rows.hot()
    windows, sizes = [], []
    for window in WINDOWS:
        counts = [
            np.bitwise_or.reduce(hot[start : start + window], axis=0).sum(axis=1)
            for first, last in pairwise(rows.offsets.tolist())
            for start in range(first, last - window + 1, window)
        ]
        if not counts:
            break
        windows.append(window)
        sizes.append(round(float(np.mean(counts)), 3))
    return {"windows_tokens": windows, "distinct_experts": sizes, "num_experts": rows.num_experts}


def stability(rows: Rows) -> dict[str, Any]:
    """Each expert's use in windows of 64 tokens: its variance over that of independent draws (1 is as steady as dice, more is
    bursts), and its correlation from one window to the next of the same sequence."""
    hot = rows.hot()
    now, after, all_windows = [], [], []
    for first, last in pairwise(rows.offsets.tolist()):
        count = (last - first) // STABILITY_TOKENS
        if count:
            part = hot[first : first + count * STABILITY_TOKENS]
            use_WLE = part.reshape(count, STABILITY_TOKENS, *hot.shape[1:]).mean(axis=1)
            all_windows.append(use_WLE)
            now.append(use_WLE[:-1])
            after.append(use_WLE[1:])
    if not all_windows or not sum(len(part) for part in now):
        return {"window_tokens": STABILITY_TOKENS, "variance_ratio": None, "autocorrelation": None}
    use = np.concatenate(all_windows)
    mean_LE = use.mean(axis=0)
    dice_LE = mean_LE * (1 - mean_LE) / STABILITY_TOKENS
    variance_LE = np.divide(use.var(axis=0), dice_LE, out=np.ones_like(dice_LE), where=dice_LE > 0)
    one, other = np.concatenate(now) - mean_LE, np.concatenate(after) - mean_LE
    scale_LE = np.sqrt((one**2).mean(axis=0) * (other**2).mean(axis=0))
    correlation_LE = np.divide((one * other).mean(axis=0), scale_LE, out=np.zeros_like(scale_LE), where=scale_LE > 0)
    return {
        "window_tokens": STABILITY_TOKENS,
        "windows": len(use),
        "variance_ratio": round(float(np.median(variance_LE)), 3),
        "autocorrelation": round(float(np.median(correlation_LE)), 3),
        "variance_ratio_per_layer": np.median(variance_LE, axis=1).round(3).tolist(),
        "autocorrelation_per_layer": np.median(correlation_LE, axis=1).round(3).tolist(),
        "autocorrelation_per_expert": correlation_LE.round(3).tolist(),
    }


def pairs(rows: Rows) -> dict[str, Any]:
    """Which experts serve the same tokens. ``group_share_ratio``: share of a token's pairs of experts that lie in one group, over
    what groups of these sizes and loads would show by chance; groups are found on every other token, counted on the rest."""
    pairs_LEE = co_activation(rows)
    count = max(2, rows.num_experts // (2 * rows.num_experts_per_tok))
    fitted = replace(rows, experts_TLK=rows.experts_TLK[::2])
    group_LE = grouped(co_activation(fitted), count)
    lift_LEE = lift(pairs_LEE, len(rows.token_T))
    rare = np.diagonal(pairs_LEE, axis1=1, axis2=2) < 0.01 * len(rows.token_T)
    lift_LEE[rare] = 1
    lift_LEE.swapaxes(1, 2)[rare] = 1
    upper = np.triu(np.ones((rows.num_experts, rows.num_experts), bool), 1)
    inside_LEE = (group_LE[:, :, None] == group_LE[:, None]) & upper
    other_LEE = co_activation(replace(rows, experts_TLK=rows.experts_TLK[1::2]))
    use_LE = np.diagonal(other_LEE, axis1=1, axis2=2)
    chance_LEE = use_LE[:, :, None] * use_LE[:, None]
    seen = (other_LEE * inside_LEE).sum() / max(1.0, (other_LEE * upper).sum())
    chance = (chance_LEE * inside_LEE).sum() / max(1.0, (chance_LEE * upper).sum())
    masked = np.where(upper, lift_LEE, 0)
    best = np.argsort(-masked, axis=None)[:10]
    strongest = [dict(zip(("layer", "expert", "with_expert"), map(int, np.unravel_index(i, masked.shape)), strict=True))
                 | {"lift": round(float(masked.flat[i]), 2)} for i in best]  # fmt: skip
    return {
        "groups": count,
        "group_per_layer": group_LE.tolist(),
        "group_share_ratio": round(float(seen / chance), 3) if chance else None,
        "strongest_pairs": strongest,
    }


def categories(rows: Rows, names: dict[int, str]) -> dict[str, Any]:
    """How much kinds of text differ: the hit ratio of the best fixed quarter of the experts, chosen on half of each kind's
    sequences, used on the other half of the same kind, of all kinds, and of the other kinds."""
    kinds = sorted({names[i] for i in rows.ids if i in names})
    halves: dict[str, list[Array]] = {}
    for kind in kinds:
        mine = [index for index, sequence in enumerate(rows.ids) if names.get(sequence) == kind]
        if len(mine) >= 2:
            halves[kind] = [_uses(rows, mine[half::2]) for half in (0, 1)]
    if len(halves) < 2:
        return {"kinds": kinds, "own_hit_ratio": None, "shared_hit_ratio": None, "other_hit_ratio": None}
    quarter = max(1, rows.num_experts // 4)
    fit = {kind: first / max(1, first.sum()) for kind, (first, _) in halves.items()}
    own: list[float] = []
    shared: list[float] = []
    other: list[float] = []
    for kind, (_, rest_LE) in halves.items():
        for out, choice_LE in (
            (own, fit[kind]), (shared, sum(fit.values())), (other, sum(fit.values()) - fit[kind]),
        ):  # fmt: skip
            chosen = np.argsort(-np.asarray(choice_LE), axis=1, kind="stable")[:, :quarter]
            out.append(np.take_along_axis(rest_LE, chosen, axis=1).sum() / max(1, rest_LE.sum()))
    return {
        "kinds": list(halves),
        "slots": quarter,
        "own_hit_ratio": round(float(np.mean(own)), 4),
        "shared_hit_ratio": round(float(np.mean(shared)), 4),
        "other_hit_ratio": round(float(np.mean(other)), 4),
    }


def unions(rows: Rows, seed: int = 0, draws: int = 400) -> dict[str, Any]:
    """Mean distinct experts of a layer that a batch of tokens of different sequences needs, and that as many tokens in a row of
    one sequence do."""
    hot, rng = rows.hot(), np.random.default_rng(seed)
    lengths = np.diff(rows.offsets)
    batches, mixed, consecutive = [], [], []
    for batch in BATCHES:
        usable = np.flatnonzero(lengths >= batch)
        if batch > len(lengths) or not len(usable):
            break
        one, other = [], []
        for _ in range(draws):
            chosen = rng.choice(len(lengths), batch, replace=False)
            at = rows.offsets[chosen] + (rng.random(batch) * lengths[chosen]).astype(np.int64)
            one.append(np.bitwise_or.reduce(hot[at], axis=0).sum(axis=1).mean())
            index = int(rng.choice(usable))
            start = int(rows.offsets[index] + rng.integers(lengths[index] - batch + 1))
            other.append(np.bitwise_or.reduce(hot[start : start + batch], axis=0).sum(axis=1).mean())
        batches.append(batch)
        mixed.append(round(float(np.mean(one)), 3))
        consecutive.append(round(float(np.mean(other)), 3))
    return {"batches": batches, "distinct_experts": mixed, "distinct_experts_in_a_row": consecutive}


def hit_curves(rows: Rows, most_tokens: int) -> dict[str, Any]:
    """Hit ratio against slots, one token a step, caches carried over from sequence to sequence, on up to 8 layers spread over the
    depth: every policy of the engine and Belady's bounds."""
    chosen = np.unique(
        np.linspace(0, rows.num_layers - 1, min(CURVE_LAYERS, rows.num_layers)).round().astype(int)
    ).tolist()
    tokens = rows.experts_TLK[:most_tokens]
    events = {layer: [sorted(set(e)) for e in tokens[:, layer].tolist()] for layer in chosen}
    visits = sum(len(event) for layer in events.values() for event in layer)
    capacities = _capacities(rows.num_experts, rows.num_experts_per_tok)
    curves: dict[str, list[float]] = {}
    for name, make_policy in POLICIES.items():
        curves[name] = []
        for capacity in capacities:
            cache = ExpertCache([capacity] * len(chosen), rows.num_experts, make_policy, InstantLoader())
            for index, layer in enumerate(chosen):
                for needed in events[layer]:
                    for _ in cache.visit(index, needed):
                        pass
            curves[name].append(round(cache.counters.demand_hits / visits, 4))
    for name, bypass in (("belady", False), ("belady-bypass", True)):
        curves[name] = [
            round(sum(belady_hits(e, c, rows.num_experts, bypass=bypass) for e in events.values()) / visits, 4)
            for c in capacities
        ]
    return {"slots": capacities, "layers": chosen, "tokens": len(tokens), "hit_ratio": curves}


def _capacities(num_experts: int, top: int) -> list[int]:
    ratios = (0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75)
    return sorted({max(top, round(ratio * num_experts)) for ratio in ratios})


def _share(rows: Rows) -> Array:
    """float64 [L, E]: share of the tokens that use the expert."""
    share: Array = _uses(rows, range(len(rows.ids))) / len(rows.token_T)
    return share


def _uses(rows: Rows, sequences: Any) -> Array:
    """float64 [L, E]: uses by these sequences."""
    out = np.zeros((rows.num_layers, rows.num_experts))
    for index in sequences:
        part = rows.experts_TLK[rows.offsets[index] : rows.offsets[index + 1]]
        for layer in range(rows.num_layers):
            out[layer] += np.bincount(part[:, layer].ravel(), minlength=rows.num_experts)
    return out
