"""The plot of ``tidegate simulate``: speed and hits against memory, and the best of a sweep. Needs matplotlib (``plot``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidegate.errors import UsageError
from tidegate.sim.sweep import Result

_MOST_LINES = 12
_AXES = ("policy", "predictor", "staging", "threshold", "bits", "batch")
_OF_PREDICTORS = ("staging", "threshold")


def plot_results(path: Path, results: Sequence[Result], best: Sequence[Result] = ()) -> None:
    """One PNG: tokens/s and hit ratio against memory (slots where no budget was given), a line for every configuration of what
    varies beside memory, or points where that would be too many lines; ``best`` is ringed and joined. Raises UsageError
    without matplotlib."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (an optional extra)
    except ImportError:
        raise UsageError('--plot draws with matplotlib: pip install "tidegate[plot]"') from None
    in_bytes = all(result.configuration.memory_bytes for result in results)
    lines = _lines(results)
    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained")
    speed, hits = figure.subplots(1, 2)
    for axes, ylabel, scale in ((speed, "tokens/s", 1.0), (hits, "hits, %", 100.0)):
        for number, (label, line) in enumerate(lines.items()):
            x = [_memory(result, in_bytes) for result in line]
            y = [scale * _height(result, axes is speed) for result in line]
            few = len(lines) <= _MOST_LINES
            axes.plot(
                x, y, marker="o", markersize=4, label=label if few else None if number else "tried",
                linestyle="-" if few else "", color=None if few else "#9aa7b3",
            )  # fmt: skip
        axes.set_xlabel("budget, GiB" if in_bytes else "expert slots, all layers")
        axes.set_ylabel(ylabel)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    _draw_bounds(hits, results, in_bytes)
    _draw_best(speed, best, in_bytes)
    handles = {
        label: handle for axes in (speed, hits) for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path)


def _memory(result: Result, in_bytes: bool) -> float:
    config = result.configuration
    return config.memory_bytes / (1 << 30) if in_bytes else float(sum(config.slots))


def _height(result: Result, is_speed: bool) -> float:
    return result.outcome.tokens_per_s if is_speed else result.outcome.hit_ratio


def _lines(results: Sequence[Result]) -> dict[str, list[Result]]:
    """By what varies, in order of memory."""
    varied = [name for name in _AXES if len({getattr(one.configuration, name) for one in results}) > 1]
    lines: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda one: (one.configuration.memory_bytes, sum(one.configuration.slots))):
        config = result.configuration
        has_effect = [
            name for name in varied if name not in _OF_PREDICTORS or config.predictor not in ("none", "gates")
        ]
        label = ", ".join(_word(name, getattr(config, name)) for name in has_effect)
        lines.setdefault(label or result.configuration.policy, []).append(result)
    return lines


def _word(name: str, value: Any) -> str:
    if name == "predictor":
        return "no prefetch" if value == "none" else Path(value).stem
    if name == "policy":
        return str(value)
    return {
        "staging": f"{value} staged",
        "threshold": f"p > {value:g}",
        "bits": f"{value} bits",
        "batch": f"batch {value}",
    }[name]


def _draw_bounds(axes: Any, results: Sequence[Result], in_bytes: bool) -> None:
    """Belady's, where one line holds for all: the same batch and width everywhere."""
    if len({(one.configuration.batch, one.configuration.bits) for one in results}) > 1:
        return
    bound = sorted({(_memory(one, in_bytes), 100 * one.belady_hit_ratio) for one in results})
    axes.plot(*zip(*bound, strict=True), color="#777", linestyle="--", label="Belady, no prefetch")


def _draw_best(axes: Any, best: Sequence[Result], in_bytes: bool) -> None:
    """The Pareto set; those of equal bits are joined, because they compete in speed and memory alone."""
    for number, bits in enumerate(sorted({one.configuration.bits for one in best})):
        front = sorted(
            (_memory(one, in_bytes), one.outcome.tokens_per_s) for one in best if one.configuration.bits == bits
        )
        axes.plot(
            *zip(*front, strict=True), color="#c0392b", linestyle=("-", "--", "-.", ":")[number % 4], linewidth=1, marker="o",
            markersize=9, markerfacecolor="none", label=f"best of the sweep, {bits} bits",
        )  # fmt: skip
