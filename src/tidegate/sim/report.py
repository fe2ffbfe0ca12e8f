"""The report folder of ``tidegate analyze``: plots as PNG files and one HTML page. Needs matplotlib (the extra ``plot``).

Legend: T rows, L MoE layers, E experts of a layer, W windows.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.errors import UsageError
from tidegate.sim.rows import Rows

_HEAT_WINDOWS, _DPI = 160, 110
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, "DejaVu Sans", sans-serif; color: #1c2530; background: #f5f7f9; margin: 0; }
main { max-width: 1060px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 8px; }
.sub { color: #5b6875; margin: 0 0 20px; }
.verdict { background: #fff; border-left: 4px solid #1f6f8b; padding: 12px 20px; border-radius: 4px; }
.verdict p { margin: 8px 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 20px 0; }
.card { background: #fff; border-radius: 6px; padding: 12px 14px; }
.card b { display: block; font-size: 22px; } .card span { color: #5b6875; font-size: 13px; }
figure { background: #fff; border-radius: 6px; margin: 12px 0; padding: 14px; }
figure img { max-width: 100%; height: auto; display: block; margin: 0 auto; }
figcaption { color: #5b6875; font-size: 14px; margin-top: 8px; }
table { border-collapse: collapse; background: #fff; border-radius: 6px; font-size: 14px; }
th, td { padding: 5px 12px; text-align: right; border-bottom: 1px solid #e6eaee; }
th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; }
@media (max-width: 640px) {
  main { padding: 20px 12px 40px; } h1 { font-size: 21px; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 28px 0 6px; }
  .verdict { padding: 6px 12px; } .cards { grid-template-columns: 1fr 1fr; gap: 8px; }
  figure { padding: 8px; overflow-x: auto; } figure img { width: 600px; max-width: none; }
  figcaption { position: sticky; left: 0; } th, td { padding: 5px 8px; white-space: nowrap; }
}
"""


def write_report(folder: Path, rows: Rows, facts: dict[str, Any]) -> Path:
    """Write the plots, analysis.json's twin in HTML, and return the page. Raises UsageError without matplotlib."""
    try:
        import matplotlib  # noqa: PLC0415  (an optional extra)
    except ImportError:
        raise UsageError('--report draws with matplotlib: pip install "tidegate[plot]"') from None
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for name, title, caption, draw in _plots(rows, facts):
        _save(folder / f"{name}.png", draw)
        sections.append(
            f'<h2>{html.escape(title)}</h2><figure><img src="{name}.png" alt="{html.escape(title)}">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    page = folder / "index.html"
    page.write_text(_page(facts, sections), encoding="utf-8")
    return page


Draw = Callable[[Any], None]


def _plots(rows: Rows, facts: dict[str, Any]) -> list[tuple[str, str, str, Draw]]:
    layer = rows.num_layers // 2
    curves, lag, union = facts["hit_curves"], facts["overlap"], facts["unions"]
    middle = "the middle layer" if rows.num_layers > 1 else "the layer"
    everywhere = len(curves["layers"]) == rows.num_layers
    which = "all layers" if everywhere else f"layers {_list(curves['layers'])}"
    return [
        ("hits", "Hit ratio against memory",
         f"Share of needed experts that are in memory, one token a step, over {which}, first "
         f"{curves['tokens']:,} tokens. Belady knows the future; bypass may also refuse to keep an expert.",
         lambda axes: _draw_curves(axes, facts)),
        ("heat", f"Which experts work when, in {middle}",
         f"Layer {layer}: share of the tokens that use an expert, over time. Experts are sorted by use; stripes are texts "
         "that favour an expert.",
         lambda axes: _draw_heat(axes, rows, layer)),
        ("lag", "How long reuse lasts",
         "Share of a token's experts that the token so many places later uses again, in the same sequence.",
         lambda axes: _draw_lines(axes, lag["lags_tokens"], {"observed": [100 * v for v in lag["overlap_ratio"]]},
                                  "tokens later", "experts shared, %",
                                  {"independent draws": 100 * lag["independent_ratio"]})),
        ("load", "Load of every expert", "Share of the tokens that use each expert; experts of a layer are sorted by load.",
         lambda axes: _draw_load(axes, facts)),
        ("working-set", "Working set", "Distinct experts that a layer uses within a window of tokens of one sequence.",
         lambda axes: _draw_lines(axes, facts["working_set"]["windows_tokens"],
                                  {"distinct experts": facts["working_set"]["distinct_experts"]}, "window, tokens",
                                  "experts of a layer", {"all": rows.num_experts})),
        ("batch", "What a batch needs",
         "Distinct experts of a layer that a step needs: tokens of different sequences, or as many tokens in a row of one.",
         lambda axes: _draw_lines(axes, union["batches"], {"different sequences": union["distinct_experts"],
                                  "in a row": union["distinct_experts_in_a_row"]}, "tokens in the step",
                                  "experts of a layer", {"all": rows.num_experts})),
        ("pairs", f"Who works with whom, in {middle}",
         f"Layer {layer}: how often two experts serve the same token, over what independent experts would show (1 is chance). "
         "Sorted by group.",
         lambda axes: _draw_pairs(axes, rows, facts, layer)),
    ]  # fmt: skip


def _save(path: Path, draw: Draw) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8.4, 4.0), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes)
    figure.savefig(path)


def _draw_curves(axes: Any, facts: dict[str, Any]) -> None:
    curves = facts["hit_curves"]
    slots = [100 * count / facts["num_experts"] for count in curves["slots"]]
    for name, values in curves["hit_ratio"].items():
        bound = name.startswith("belady")
        axes.plot(
            slots, [100 * v for v in values], label=name, color="#777" if bound else None,
            linestyle=":" if name == "belady-bypass" else "--" if bound else "-", marker=None if bound else "o", markersize=4,
        )  # fmt: skip
    axes.set_xlabel("slots, % of a layer's experts")
    axes.set_ylabel("hits, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_lines(axes: Any, x: list[int], lines: dict[str, list[float]], xlabel: str, ylabel: str, level: Any) -> None:
    for name, values in lines.items():
        axes.plot(x, values, marker="o", label=name)
    for name, value in level.items():
        axes.axhline(value, color="#777", linestyle="--", label=name)
    if x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [str(v) for v in x])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_heat(axes: Any, rows: Rows, layer: int) -> None:
    hot_TE = rows.hot(slice(layer, layer + 1))[:, 0].astype(np.float32)
    size = max(1, len(hot_TE) // _HEAT_WINDOWS)
    count = len(hot_TE) // size
    use_WE = hot_TE[: count * size].reshape(count, size, -1).mean(axis=1)
    order = np.argsort(-use_WE.mean(axis=0), kind="stable")
    axes.figure.colorbar(
        axes.imshow(use_WE[:, order].T, aspect="auto", cmap="magma", interpolation="nearest", vmin=0,
                    extent=(0, count * size, len(order), 0)),
        ax=axes, label="share of tokens",
    )  # fmt: skip
    axes.set_xlabel("tokens of the trace")
    axes.set_ylabel("experts, busiest first")


def _draw_load(axes: Any, facts: dict[str, Any]) -> None:
    share_LE = -np.sort(-np.array(facts["load"]["use_ratio_per_layer"]), axis=1)
    axes.figure.colorbar(
        axes.imshow(share_LE, aspect="auto", cmap="magma", interpolation="nearest", vmin=0),
        ax=axes,
        label="share of tokens",
    )
    axes.set_xlabel("experts, busiest first")
    axes.set_ylabel("MoE layer")


def _draw_pairs(axes: Any, rows: Rows, facts: dict[str, Any], layer: int) -> None:
    from tidegate.sim.groups import lift  # noqa: PLC0415  (drawn once)

    hot_TE = rows.hot(slice(layer, layer + 1))[:, 0].astype(np.float32)
    lift_EE = lift((hot_TE.T @ hot_TE)[None].astype(float), len(hot_TE))[0]
    np.fill_diagonal(lift_EE, np.nan)
    order = np.argsort(facts["pairs"]["group_per_layer"][layer], kind="stable")
    axes.figure.colorbar(
        axes.imshow(lift_EE[np.ix_(order, order)], cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest", aspect="auto"),
        ax=axes, label="times chance",
    )  # fmt: skip
    axes.set_xlabel("expert")
    axes.set_ylabel("expert")
    axes.set_xticks([])
    axes.set_yticks([])


def _page(facts: dict[str, Any], sections: list[str]) -> str:
    curves = facts["hit_curves"]
    head = "".join(f"<th>{count} slots</th>" for count in curves["slots"])
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{value:.1%}</td>' for value in values)}</tr>"
        for name, values in curves["hit_ratio"].items()
    )
    grouped = facts["pairs"]["group_share_ratio"]
    cards = {
        f"{facts['num_layers']} x {facts['num_experts']}, top {facts['num_experts_per_tok']}": "MoE layers x experts",
        f"{facts['load']['top_quarter_ratio']:.0%}": "of the work by the busiest quarter",
        f"{facts['load']['entropy_ratio']:.2f}": "entropy of the load (1 is even)",
        f"{facts['overlap']['overlap_ratio'][0]:.0%}" if facts["overlap"]["overlap_ratio"] else "-":
            "experts shared by neighbouring tokens",
        "-" if grouped is None else f"{grouped:.1f} x chance": "pairs of experts within groups",
    }  # fmt: skip
    boxes = "".join(
        f'<div class="card"><b>{html.escape(k)}</b><span>{html.escape(v)}</span></div>' for k, v in cards.items()
    )
    verdict = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in facts["verdict"])
    source = html.escape(facts["source"] or "a trace")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Routing of {source}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body><main>'
        f"<h1>Routing of {source}</h1><p class=sub>{facts['tokens']:,} tokens of {facts['sequences']:,} sequences</p>"
        f'<div class="verdict">{verdict}</div><div class="cards">{boxes}</div>{sections[0]}'
        f'<div class="scroll"><table><tr><th>hits</th>{head}</tr>{body}</table></div>{"".join(sections[1:])}'
        "</main></body></html>\n"
    )


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
