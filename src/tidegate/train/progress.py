"""What a person sees of a run: a progress bar, and the curves as a picture."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from tidegate.train.checkpoint import read_curve
from tidegate.train.options import TrainOptions

_SMOOTHING = 0.02


class Progress:
    """A bar with loss, tokens/s and expert entropy; draws ``curve.png`` on leaving where matplotlib is installed."""

    def __init__(self, options: TrainOptions, run: Path) -> None:
        self._run = run
        self._bar = Bar(
            BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"), transient=False
        )
        self._task = self._bar.add_task("compiling the kernels", total=options.steps)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if find_spec("matplotlib"):
            draw_curve(self._run / "curve.jsonl", self._run / "curve.png")

    def __call__(self, record: dict[str, Any]) -> None:
        text = (
            f"loss {record['nll']:.3f}  {record['tokens_per_s']:,.0f} tokens/s  "
            f"expert entropy {record['expert_entropy_ratio']:.3f}"
        )
        self._bar.update(self._task, completed=record["step"] + 1, description=text)
        if "heldout" in record:
            each = "  ".join(f"{domain} {nll:.2f}" for domain, nll in record["heldout"].items())
            self._bar.console.print(f"step {record['step'] + 1}, held-out nats per token: {each}")


def draw_curve(source: Path, destination: Path) -> None:
    """Loss (training and held-out by domain) and expert entropy over steps."""
    import matplotlib as mpl  # noqa: PLC0415  (an extra)

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    records = read_curve(source)
    if not records:
        return
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 1))
    steps = [record["step"] for record in records]
    smooth, value = [], records[0]["nll"]
    for record in records:
        value += _SMOOTHING * (record["nll"] - value)
        smooth.append(value)
    top.plot(steps, smooth, color="black", label="training (smoothed)")
    checked = [record for record in records if "heldout" in record]
    for domain in checked[0]["heldout"] if checked else ():
        points = [(record["step"], record["heldout"][domain]) for record in checked]
        top.plot(*zip(*points, strict=True), marker=".", linewidth=1, label=f"held-out {domain}")
    top.set_ylabel("nats per token")
    top.legend()
    bottom.plot(steps, [record["expert_entropy_ratio"] for record in records], linewidth=0.7)
    bottom.set(ylabel="expert entropy ratio", xlabel="step")
    figure.tight_layout()
    figure.savefig(destination, dpi=110)
    pyplot.close(figure)
