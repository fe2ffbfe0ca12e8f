"""``tidegate doctor``: run a model for a moment, compare plan and reality, and say what would help."""

from __future__ import annotations

import json
import random
from typing import Annotated, Any

from tidegate.cli.arguments import Argument, Flag
from tidegate.cli.options import context_from, flags
from tidegate.cli.progress import converting
from tidegate.config import EngineOptions, SamplingOptions, parse_options
from tidegate.engine.bench import make_card, measure
from tidegate.engine.build import Runtime, build
from tidegate.engine.model import Model
from tidegate.engine.sequence import Sequence
from tidegate.engine.source import open_store
from tidegate.planner.doctor import Observed, comparison, findings
from tidegate.planner.machine import load_machine
from tidegate.planner.measure import OtherWork


@flags({"Model and memory": EngineOptions}, without=("sequences",))
def command(
    model: Annotated[str, Argument(help="An expert store, a Hugging Face folder, a GGUF file, or builtin.")],
    prompt: Annotated[int, Flag(min=1, help="Random tokens of the prompt.")] = 64,
    answer: Annotated[int, Flag(min=1, help="Random tokens computed one by one after it.")] = 32,
    as_json: Annotated[bool, Flag("--json", help="Print one JSON object.")] = False,
    **options: Any,
) -> int:
    """The tokens are random, so the hit rate is that of unfamiliar text. Exit code 1 if something is wrong with the memory."""
    with context_from(f"--prompt {prompt} and --answer {answer}", options, prompt + answer + 1):
        parsed = parse_options(EngineOptions, options)
        with converting(model) as progress:
            store = open_store(model, parsed, progress=progress)
        runtime = build(store, parsed)
    with Model(runtime) as loaded:
        run = _observe(loaded.runtime, prompt, answer)
    said = findings(run)
    if as_json:
        print(json.dumps({"comparison": comparison(run), "findings": said, "stats": dict(run.stats)}))
    else:
        print(f"{'':22}{'planned':>12}{'real':>12}")
        for what, planned, real in comparison(run):
            print(f"{what:22}{planned:>12}{real:>12}")
        for number, text in enumerate(said, 1):
            print(f"{number}. {text}")
    return 1 if any("please report" in text for text in said) else 0


def _observe(runtime: Runtime, prompt: int, answer: int) -> Observed:
    others = OtherWork()
    ids = random.Random(0).choices(range(runtime.config.vocab_size), k=prompt + answer)
    found = measure(runtime, make_card(runtime, prompt + answer), ids, prompt)
    counters, stats = found.decode.counters, runtime.stats()
    _largest_step(runtime, ids)
    visits = counters["demand_hits"] + counters["prefetch_hits"] + counters["misses"]
    return Observed(
        runtime.store,
        runtime.plan,
        runtime.sizes,
        load_machine(runtime.store.path),
        runtime.threads,
        stats,
        counters["demand_hits"] / visits if visits else 1.0,
        counters["wait_ns"] / 1e9,
        getattr(runtime.decoder.backend, "workspace_peak_bytes", 0),
        others.ratio(),
    )


def _largest_step(runtime: Runtime, ids: list[int]) -> None:
    """A step of as many tokens as the plan allows for, so that activations are seen at their peak."""
    count = min(runtime.sizes.prefill_chunk, runtime.sizes.context_tokens - 1)
    tokens = (ids * -(-count // len(ids)))[:count]
    runtime.engine.scheduler.add(Sequence(-1, tokens, 1, SamplingOptions(ignore_eos=True)))
    while not runtime.engine.scheduler.is_idle:
        runtime.engine.step()
