"""How much waiting prefetch removes, and what it costs: a text decoded in one budget with each way to guess, in turns.

    python benchmarks/prefetch.py STORE --memory 1200MB --memory 2200MB [--rounds 3] [--decode 96] [--forced 0.5] [--misled 0.5]
    python benchmarks/prefetch.py SMALL_STORE --memory "16 slots"       (a layer; for models that are small beside the process)

Modes: off; gates (the routers themselves); fitted (if `tidegate fit-predictor` has left its file in the store); every --predictor
(a kind or a file, as for `tidegate run`); forced (guesses that are right with the given probability, from a recording of the
text's routing; steps that ask for them run in Python, which a small model feels); misled (the routers themselves, but so many of
the experts go by each other's names: wrong guesses at the usual cost). Prints one JSON line a run, and medians at the end. Wasted
is the share of prefetched bytes that were not needed.
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

from tidegate.checkpoint.manifest import PREDICTOR_FILE
from tidegate.engine import bench
from tidegate.engine.model import Model, load
from tidegate.experts.gates_file import Gate, save_gates, start_gate
from tidegate.experts.lookahead import OWN_CURVES
from tidegate.experts.trace import TraceReader
from tidegate.models.guesses import own_gate, own_gates
from tidegate.models.weights import moe_weights
from tidegate.plan import Needs
from tidegate.sim.oracle import ForcedGuesses

_TEXT = Path(bench.__file__).with_suffix(".txt")
_TRIES = 4


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
    parser.add_argument("--misled", type=float, action="append", default=[], help="share of experts under wrong names")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.misled_file = {f"misled {share}": Path(folder) / f"misled-{share}" for share in args.misled}
        for mode, path in args.misled_file.items():
            _alone(_save_misled, args, float(mode.split()[1]), path)
        _compare(args)


def _compare(args: argparse.Namespace) -> None:
    modes = ["off", "gates", *(["fitted"] if (args.store / PREDICTOR_FILE).exists() else [])]
    modes += [f"predictor {name}" for name in args.predictor]
    modes += [f"forced {accuracy}" for accuracy in args.forced] + list(args.misled_file)
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    ids = _alone(_ids, args)
    routing = _alone(_routing, args, ids) if args.forced else None
    for memory in args.memory:
        budgets = {mode: _Budget(args, memory, mode) for mode in modes}
        for turn in range(args.rounds):
            for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
                found = budgets[mode].run(ids, routing)
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
    if mode in args.misled_file:
        keywords["predictor"] = str(args.misled_file[mode])
    if args.threads is not None:
        keywords["threads"] = args.threads
    return load(args.store, **({} if memory is None else {"memory": memory}), **keywords)


class _Budget:
    """``memory``, or what gives "16 slots" a layer: tried, because a process takes a little more or less each time."""

    def __init__(self, args: argparse.Namespace, memory: str, mode: str) -> None:
        self._args, self._mode = args, mode
        self._memory: int | str = memory
        self._slots = 0
        if memory.endswith("slots"):
            needs = _alone(_needs, args, mode)
            self._slots = needs.num_layers * int(memory.removesuffix("slots"))
            self._memory, self._slot_bytes = needs.budget_for(self._slots), needs.slot_bytes

    def run(self, ids: list[int], routing: np.ndarray | None) -> dict[str, Any]:
        for _ in range(_TRIES):
            found, slots = _alone(_run, self._args, self._memory, self._mode, ids, routing)
            if self._slots in (0, slots):
                break
            assert isinstance(self._memory, int)
            self._memory += (self._slots - slots) * self._slot_bytes
        return found


def _needs(args: argparse.Namespace, mode: str) -> Needs:
    with _open(args, None, mode) as model:
        return model.plan.needs


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


def _save_misled(args: argparse.Namespace, share: float, path: Path) -> None:
    """The routers' own gates as a predictor's file; in each of them so many experts go by the next one's name."""
    draw = np.random.default_rng(0)

    def mislead(gate: Gate) -> Gate:
        order = np.arange(len(gate.bias_E))
        wrong = draw.permutation(len(order))[: round(share * len(order))]
        order[wrong] = np.roll(wrong, 1)
        return Gate(gate.matrix_ED[order], gate.bias_E[order])

    with _open(args, None, "off") as model:
        layers = moe_weights(model.runtime.decoder.weights)
        gates = {start_gate(0): own_gate(layers[0].norm, layers[0]), **dict(own_gates(layers))}
        misled = {name: mislead(gate) for name, gate in gates.items()}
        save_gates(path, model.runtime.store, misled, OWN_CURVES)


def _run(
    args: argparse.Namespace, memory: int | str, mode: str, ids: list[int], routing: np.ndarray | None
) -> tuple[dict[str, Any], int]:
    """What was measured, and the slots of all layers."""
    with _open(args, memory, mode) as model:
        runtime = model.runtime
        assert runtime.experts is not None
        if routing is not None and mode.startswith("forced"):
            num_experts = runtime.plan.needs.num_experts
            accuracy = float(mode.split()[1])
            runtime.experts.guesser = ForcedGuesses(routing, num_experts, accuracy, lambda: runtime.engine.times.steps)
        card = bench.make_card(runtime, args.prefill)
        found = bench.measure(runtime, card, ids, args.prefill)
        slots = sum(runtime.plan.slots)
    phase, counters = found.decode, found.decode.counters
    useful_bytes = counters["prefetch_hits"] * card.expert_bytes
    issued, dropped = counters["prefetch_issued"], counters["prefetch_dropped"]
    tokens = phase.tokens
    report = {
        "slots_per_layer": round(slots / len(runtime.plan.slots), 1),
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
    return report, slots


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
            f"| {Path(mode).name} | {median(mode, 'tokens_per_s'):.1f} | {median(mode, 'tokens_per_s') / speed:.3f} | "
            f"{median(mode, 'hit_ratio'):.1%} | {wait:.2f} | "
            f"{1 - wait / waiting if waiting else 0:.0%} | {median(mode, 'read_bytes_per_token') / max(1, bytes_read):.3f} | "
            f"{useful:.0f} | {median(mode, 'late'):.0f} | {median(mode, 'wasted'):.0f} | "
            f"{median(mode, 'wasted_bytes_ratio'):.0%} | {median(mode, 'dropped_ratio'):.0%} | "
            f"{median(mode, 'guess_us_per_layer'):.0f} |"
        )


if __name__ == "__main__":
    main()
