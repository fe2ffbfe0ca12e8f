"""What the engine costs beside bytes: a model whose weights are next to nothing, run for real. A process of its own, because it
also tells how much memory one takes before a model."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import tidegate
from tidegate.config import SamplingOptions
from tidegate.engine.engine import Engine
from tidegate.engine.sequence import Sequence as Request
from tidegate.planner.costs import Bookkeeping, Cost, Overhead, middle
from tidegate.planner.measure_bookkeeping import measure_bookkeeping

# Layers and experts per token of the models, whose other sizes are those of write_tiny_store.
SHAPES = ((16, 8), (16, 2), (4, 8))
_WARM_UP, _STEPS = 32, 96
_ROWS, _PASSES = 4, 3


@dataclass(frozen=True)
class EngineCosts:
    """See Machine."""

    overhead: Overhead
    row_overhead: Overhead
    runtime_bytes: int
    bookkeeping: Bookkeeping


def measure(stores: Sequence[str], threads: int) -> EngineCosts:
    """``stores``: of write_tiny_store, one for each of SHAPES."""
    with ExitStack() as opened:
        models = [
            opened.enter_context(tidegate.load(store, memory="1GiB", context=256, threads=threads, sequences=_ROWS))
            for store in stores
        ]
        turns = [[_steps_s(model.runtime.engine) for model in models] for _ in range(_PASSES)]
        runtime_bytes = models[0].runtime.plan.needs.runtime_bytes
    # A machine that is shared stands still now and then for longer than all steps of a pass.
    ones, rows = (
        [statistics.median(turn[model][kind] for turn in turns) for model in range(len(stores))] for kind in (0, 1)
    )
    return EngineCosts(_overhead(*ones), _overhead(*rows), runtime_bytes, measure_bookkeeping(threads))


def _steps_s(engine: Engine) -> tuple[float, float]:
    """A step of one sequence, and each further one in it."""
    one_s = _step_s(engine, 1)
    return one_s, max(0.0, _step_s(engine, _ROWS) - one_s) / (_ROWS - 1)


def _overhead(many_s: float, few_chosen_s: float, few_layers_s: float) -> Overhead:
    """From a step of each of SHAPES."""
    (layers, chosen), (_, few_chosen), (few_layers, _) = SHAPES
    by_layer = Cost.through((few_layers, few_layers_s), (layers, many_s))
    layer = Cost.through((few_chosen, by_layer.each_s - (many_s - few_chosen_s) / layers), (chosen, by_layer.each_s))
    return Overhead(by_layer.base_s, layer)


def main(threads: int, stores: Sequence[str]) -> None:
    print(json.dumps(asdict(measure(stores, threads))))


def parse(texts: Sequence[str]) -> EngineCosts:
    """The middle of what ``main`` printed."""
    found = middle([json.loads(text) for text in texts])
    return EngineCosts(
        Overhead.from_json(found["overhead"]), Overhead.from_json(found["row_overhead"]), int(found["runtime_bytes"]),
        Bookkeeping.from_json(found["bookkeeping"]),
    )  # fmt: skip


def _step_s(engine: Engine, count: int) -> float:
    """A decoding step of so many sequences."""
    length = _WARM_UP + _STEPS
    running = [Request(n + 1, [1, 2, 3], length, SamplingOptions(ignore_eos=True)) for n in range(count)]
    for sequence in running:
        engine.scheduler.add(sequence)
    took_s = []
    while any(sequence.finish_reason is None for sequence in running):
        start_s = time.perf_counter()
        engine.step()
        took_s.append(time.perf_counter() - start_s)
    return statistics.median(took_s[_WARM_UP:-1])
