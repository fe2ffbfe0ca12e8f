"""How much waiting prefetch removes, and what it costs: a text decoded in one budget with each way to guess, in turns.

    python benchmarks/prefetch.py STORE --memory 1200MB --memory 2200MB [--rounds 3] [--decode 96] [--forced 0.5]
    python benchmarks/prefetch.py SMALL_STORE --memory "16 slots"       (a layer; for models that are small beside the process)

Modes: off; gates (the routers themselves); fitted (if `tidegate fit-predictor` has left its file in the store); every --predictor
(a kind or a file, as for `tidegate run`); forced (guesses that are right with the given probability, from a recording of the
text's routing). Prints one JSON line a run, and medians at the
end. Wasted is the share of prefetched bytes that were not needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.engine import bench
from tidegate.engine.model import Model, load
from tidegate.experts.gates_file import PREDICTOR_FILE
from tidegate.experts.trace import TraceReader
from tidegate.plan import Needs
from tidegate.sim.oracle import ForcedGuesses

_TEXT = Path(bench.__file__).with_suffix(".txt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--memory", action="append", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=64)
    parser.add_argument("--decode", type=int, default=96)
    parser.add_argument("--text", type=Path, default=_TEXT)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--forced", type=float, action="append", default=[], help="accuracy of forced guesses")
    parser.add_argument("--predictor", action="append", default=[], help="last-token, window, decayed or a file")
    args = parser.parse_args()
    modes = ["off", "gates", *(["fitted"] if (args.store / PREDICTOR_FILE).exists() else [])]
    modes += [f"predictor {name}" for name in args.predictor]
    modes += [f"forced {accuracy}" for accuracy in args.forced]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    ids = _alone(_ids, args)
    routing = _alone(_routing, args, ids) if args.forced else None
    for memory in args.memory:
        budgets = {mode: _budget(args, memory, mode) for mode in modes}
        for turn in range(args.rounds):
            for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
                found = _alone(_run, args, budgets[mode], mode, ids, routing)
                print(json.dumps({"memory": memory, "mode": mode, **found}), flush=True)
                runs.setdefault((memory, mode), []).append(found)
    for memory in args.memory:
        _print_medians(memory, {mode: runs[memory, mode] for mode in modes})


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """In a process of its own, so that every run finds the same budget for its slots."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _open(args: argparse.Namespace, memory: int | str | None, mode: str) -> Model:
    """``memory`` None: whatever there is."""
    keywords: dict[str, Any] = {
        "context": args.prefill + args.decode + 16,
        "prefetch": "off" if mode == "off" else "auto",
        "predictor": "auto" if mode in ("off", "fitted") else mode.removeprefix("predictor "),
    }
    if mode.startswith("forced"):
        keywords["predictor"] = "gates"
    if args.threads is not None:
        keywords["threads"] = args.threads
    return load(args.store, **({} if memory is None else {"memory": memory}), **keywords)


def _budget(args: argparse.Namespace, memory: str, mode: str) -> int | str:
    """``memory``, or a budget for "16 slots" a layer: tried, because a process takes a little more or less each time."""
    if not memory.endswith("slots"):
        return memory
    needs, _ = _alone(_plan, args, None, mode)
    wanted = needs.num_layers * int(memory.removesuffix("slots"))
    budget = needs.budget_for(wanted)
    for _ in range(2):
        _, slots = _alone(_plan, args, budget, mode)
        budget += (wanted - slots) * needs.slot_bytes
    return budget


def _plan(args: argparse.Namespace, memory: int | None, mode: str) -> tuple[Needs, int]:
    with _open(args, memory, mode) as model:
        return model.plan.needs, sum(model.plan.slots)


def _ids(args: argparse.Namespace) -> list[int]:
    """Apart from the runs, because a tokenizer at work takes memory that a small budget does not have."""
    with _open(args, None, "off") as model:
        return model.encode(args.text.read_text(encoding="utf-8"))[: args.prefill + args.decode]


def _routing(args: argparse.Namespace, ids: list[int]) -> np.ndarray:
    """Experts [steps, L, K] of the text, the last row of each step; the same for every budget."""
    with tempfile.TemporaryDirectory() as folder, _open(args, None, "off") as model:
        path = Path(folder) / "t.trace"
        card = bench.make_card(model.runtime, args.prefill)
        with model.trace(path):
            bench.measure(model.runtime, card, ids, args.prefill)
        chunks = list(TraceReader(path))
    step_T = np.concatenate([chunk.step for chunk in chunks])
    experts = np.concatenate([chunk.experts for chunk in chunks])
    return experts[np.append(np.flatnonzero(np.diff(step_T)), len(step_T) - 1)]


def _run(
    args: argparse.Namespace, memory: int | str, mode: str, ids: list[int], routing: np.ndarray | None
) -> dict[str, Any]:
    with _open(args, memory, mode) as model:
        runtime = model.runtime
        assert runtime.experts is not None
        if routing is not None and mode.startswith("forced"):
            num_experts = runtime.plan.needs.num_experts
            accuracy = float(mode.split()[1])
            runtime.experts.guesser = ForcedGuesses(routing, num_experts, accuracy, lambda: runtime.engine.times.steps)
        card = bench.make_card(runtime, args.prefill)
        found = bench.measure(runtime, card, ids, args.prefill)
        slots = sum(runtime.plan.slots) / len(runtime.plan.slots)
    phase, counters = found.decode, found.decode.counters
    useful_bytes = counters["prefetch_hits"] * card.expert_bytes
    issued, dropped = counters["prefetch_issued"], counters["prefetch_dropped"]
    tokens = phase.tokens
    return {
        "slots_per_layer": round(slots, 1),
        "load_over_layer_ratio": round(card.load_ratio, 3),
        "tokens_per_s": round(phase.tokens_per_s, 2),
        "waiting_ms_per_token": round(counters["wait_ns"] / 1e6 / tokens, 3),
        "read_bytes_per_token": round(counters["read_bytes"] / tokens),
        "misses_per_token": round(counters["misses"] / tokens, 2),
        "busy_ratio": round(counters["busy_ns"] / 1e9 / phase.elapsed_s, 3),
        "hit_ratio": phase.to_json("")["_hit_ratio"],
        "guess_us_per_layer": round(counters["guess_ns"] / 1e3 / tokens / len(runtime.plan.slots), 1),
        "visit_us_per_layer": round(counters["visit_ns"] / 1e3 / tokens / len(runtime.plan.slots), 1),
        "useful": counters["prefetch_hits"],
        "late": counters["prefetch_late"],
        "wasted": counters["prefetch_wasted"],
        "dropped": dropped,
        "wasted_bytes_ratio": round(counters["wasted_bytes"] / max(1, counters["wasted_bytes"] + useful_bytes), 4),
        "dropped_ratio": round(dropped / max(1, dropped + issued), 4),
        "estimated_stall_removed_s": round(phase.stall_removed_s, 4),
    }


def _print_medians(memory: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    def median(mode: str, key: str) -> float:
        return statistics.median(run[key] for run in runs[mode])

    waiting, bytes_read, speed = (
        median("off", key) for key in ("waiting_ms_per_token", "read_bytes_per_token", "tokens_per_s")
    )
    ratio, slots = median("off", "load_over_layer_ratio"), median("off", "slots_per_layer")
    print(
        f"\n{memory}: R = {ratio:.2f}, {slots:.0f} slots a layer, channel busy {median('off', 'busy_ratio'):.0%} without prefetch"
    )
    print(
        "| mode | tokens/s | of off | hits | waiting ms/token | removed | bytes of off | useful | late | wasted | of bytes | "
        "dropped | guesses, us a layer |"
    )
    print("|---" * 13 + "|")
    for mode in runs:
        wait, useful = median(mode, "waiting_ms_per_token"), median(mode, "useful")
        print(
            f"| {Path(mode).stem} | {median(mode, 'tokens_per_s'):.1f} | {median(mode, 'tokens_per_s') / speed:.3f} | "
            f"{median(mode, 'hit_ratio'):.1%} | {wait:.2f} | "
            f"{1 - wait / waiting if waiting else 0:.0%} | {median(mode, 'read_bytes_per_token') / max(1, bytes_read):.3f} | "
            f"{useful:.0f} | {median(mode, 'late'):.0f} | {median(mode, 'wasted'):.0f} | "
            f"{median(mode, 'wasted_bytes_ratio'):.0%} | {median(mode, 'dropped_ratio'):.0%} | "
            f"{median(mode, 'guess_us_per_layer'):.0f} |"
        )


if __name__ == "__main__":
    main()
