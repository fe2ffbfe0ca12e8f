"""What a person sees of a run: a progress bar, and the curves as a picture."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tidegate.terminal import StatusLine, bar
from tidegate.train.checkpoint import read_curve
from tidegate.train.options import TrainOptions
from tidegate.units import format_seconds

_SMOOTHING = 0.02
_BAR_CELLS = 20


class Progress:
    """A bar with loss, tokens/s and expert entropy on a terminal, and a line for every look at held-out text; draws
    ``curve.png`` on leaving where matplotlib is installed."""

    def __init__(self, options: TrainOptions, run: Path) -> None:
        self._run, self._options = run, options
        self._status = StatusLine() if sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        if self._status is not None and self._options.compile:
            self._status.show("compiling the kernels", now=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.close()
        if find_spec("matplotlib") and (curve := self._run / "curve.jsonl").exists():
            draw_curve(curve, self._run / "curve.png")

    def __call__(self, record: dict[str, Any]) -> None:
        done, options = record["step"] + 1, self._options
        left_s = (options.steps - done) * options.tokens_per_step / record["tokens_per_s"]
        line = (
            f"{bar(done / options.steps, _BAR_CELLS)} {done}/{options.steps}  {format_seconds(left_s)} left  loss "
            f"{record['nll']:.3f}  {record['tokens_per_s']:,.0f} tokens/s  expert entropy {record['expert_entropy_ratio']:.3f}"
        )
        if self._status is not None:
            self._status.show(line)
        if "heldout" in record:
            each = "  ".join(f"{domain} {nll:.2f}" for domain, nll in record["heldout"].items())
            heldout = f"step {done}, held-out nats per token: {each}"
            if self._status is not None:
                self._status.say(heldout)
            else:
                print(f"{line}\n{heldout}", file=sys.stderr, flush=True)


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
