"""What the engine costs beside bytes: a model whose weights are next to nothing, run for real. A process of its own, because it
also tells how much memory one takes before a model."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

import tidegate
from tidegate import _core
from tidegate.backends.base import F32Array, I32Array
from tidegate.backends.cpu import CpuBackend
from tidegate.checkpoint.open import BUILTIN_STORE
from tidegate.config import SamplingOptions
from tidegate.engine.engine import Engine
from tidegate.engine.sequence import Sequence
from tidegate.experts.base import CacheCounters
from tidegate.experts.cache import ExpertCache
from tidegate.experts.loader import NativeLoader
from tidegate.experts.lookahead import DISTANCES, Lookahead
from tidegate.experts.policy import DEFAULT_POLICY, policy_factory
from tidegate.models.guesses import Guess
from tidegate.planner.machine import Bookkeeping

_WARM_UP, _STEPS, _ROUNDS, _TOKENS = 32, 96, 200, 240
_WORK_BYTES, _GUESSES = 1 << 20, 8


@dataclass(frozen=True)
class EngineCosts:
    """``layer_s``, ``row_s``, ``runtime_bytes``: see Machine."""

    layer_s: float
    row_s: float
    runtime_bytes: int
    bookkeeping: Bookkeeping


def measure(store: str, threads: int) -> EngineCosts:
    """``store``: one of write_tiny_store."""
    with tidegate.load(store, memory="1GiB", context=256, threads=threads, sequences=4) as model:
        runtime = model.runtime
        engine, experts, loader, backend = runtime.engine, runtime.experts, runtime.loader, runtime.decoder.backend
        assert experts is not None and loader is not None and isinstance(backend, CpuBackend)
        layers = len(experts.layouts)
        one_s, four_s = _step_s(engine, 1), _step_s(engine, 4)
        experts.trace = _Weighing(layers, experts.cache.num_experts)
        gate_s = max(0.0, _step_s(engine, 1) - one_s) / (DISTANCES * (layers - 1))
        asking = _Asking(loader, experts.cache.num_experts, backend.compute)
        bookkeeping = asking.bookkeeping(_wake_s(threads), gate_s)
        row_s = max(0.0, four_s - one_s) / 3 / layers
        return EngineCosts(one_s / layers, row_s, runtime.plan.needs.runtime_bytes, bookkeeping)


def _wake_s(threads: int) -> float:
    """From a load to its read, if the loader was idle: the model that comes with Tidegate answers with half of its experts in
    memory. How soon the loader's thread gets a core depends on what the others do just then."""
    with tidegate.load(BUILTIN_STORE, memory="1GiB", context=256, threads=threads) as model:
        runtime = model.runtime
        experts, loader = runtime.experts, runtime.loader
        assert experts is not None and loader is not None
        slots, count = [experts.cache.num_experts // 2] * experts.cache.num_layers, experts.cache.num_experts
        experts.cache = ExpertCache(slots, count, policy_factory(DEFAULT_POLICY), loader)
        experts.lookahead = Lookahead(experts.cache, runtime.plan.needs.min_slots, loader.busy_ratio)
        model.generate([1], max_tokens=_TOKENS, temperature=1.0, seed=0, ignore_eos=True)
        counters = loader.counters()
        return counters.wake_ns * 1e-9 / max(1, counters.wakes)


def main(store: str, threads: int) -> None:
    print(json.dumps(asdict(measure(store, threads))))


def parse(text: str) -> EngineCosts:
    """What ``main`` printed."""
    found: dict[str, Any] = json.loads(text)
    return EngineCosts(**{**found, "bookkeeping": Bookkeeping(**found["bookkeeping"])})


def _step_s(engine: Engine, count: int) -> float:
    """A decoding step of so many sequences."""
    length = _WARM_UP + _STEPS
    running = [Sequence(n + 1, [1, 2, 3], length, SamplingOptions(ignore_eos=True)) for n in range(count)]
    for sequence in running:
        engine.scheduler.add(sequence)
    took_s = []
    while any(sequence.finish_reason is None for sequence in running):
        start_s = time.perf_counter()
        engine.step()
        took_s.append(time.perf_counter() - start_s)
    return statistics.median(took_s[_WARM_UP:-1])


class _Weighing:
    """A trace that keeps nothing: it asks the gates for their guesses and weighs the first few as if half of all experts were in
    memory."""

    wants_hidden, wants_guesses = False, True

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._lookahead = Lookahead(_HalfHere(num_layers, num_experts), _GUESSES, lambda: 0.0)  # type: ignore[arg-type]
        self._num_layers, self._layer = num_layers, 0

    def record(self, topk_expert_ids_TK: I32Array, topk_weights_TK: F32Array, hidden_TD: F32Array | None) -> None:
        """A layer has chosen."""
        if self._layer == 0:
            self._lookahead.begin_step(len(topk_expert_ids_TK))
        self._lookahead.after_route(self._layer, topk_expert_ids_TK[0].tolist())
        self._layer = (self._layer + 1) % self._num_layers

    def record_guess(self, guess: Guess) -> None:
        """As Experts.tell."""
        for ranked, margins in zip(guess.experts_TG, guess.margins_TG, strict=True):
            self._lookahead.foresee(guess.layer, guess.distance, ranked[:_GUESSES], margins)


class _HalfHere:
    """A cache that has every other expert and gets no more."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.num_layers, self.num_experts = num_layers, num_experts
        self.counters = CacheCounters()
        self._is_here = bytearray(expert % 2 == 0 for expert in range(num_experts))

    def capacity(self, layer: int) -> int:
        return sum(self._is_here)

    def is_here(self, layer: int) -> bytearray:
        return self._is_here

    def worth(self, layer: int, odds: float) -> float:
        return odds

    def prefetch(self, layer: int, expert: int, value: float, keep: Collection[int]) -> bool:
        return False

    def cancel_refuted(self, layer: int) -> None:
        pass


class _Asking:
    """A cache with half of its experts in memory. ``loader`` has room for them and is used by nobody else."""

    def __init__(self, loader: NativeLoader, num_experts: int, compute: _core.Compute) -> None:
        self._loader, self._compute = loader, compute
        self._cache = ExpertCache([num_experts // 2], num_experts, policy_factory(DEFAULT_POLICY), loader)
        self._next, self._work = 0, np.ones(_WORK_BYTES, np.uint8)

    def bookkeeping(self, wake_s: float, gate_s: float) -> Bookkeeping:
        here_s, one_s, four_s, ahead_s = [], [], [], []
        for _ in range(_ROUNDS):
            four = self._absent(4)
            four_s.append(self._visit_s(four))
            here_s.append(self._visit_s(four))
            one_s.append(self._visit_s([*four[1:], *self._absent(1)]))
            ahead_s.append(self._second_ahead_s(*self._absent(2)))
        here, one, many, ahead = map(statistics.median, (here_s, one_s, four_s, ahead_s))
        miss = max(0.0, many - one) / 3
        return Bookkeeping(wake_s, miss, ahead, max(0.0, one - here - miss), gate_s)

    def _absent(self, count: int) -> list[int]:
        """Experts that have no slot, all of them in turn."""
        turn = chain(range(self._next, self._cache.num_experts), range(self._next))
        found = list(islice((expert for expert in turn if expert not in self._cache.residents(0)), count))
        self._next = found[-1] + 1
        return found

    def _visit_s(self, experts: list[int]) -> float:
        """Until the loads are on their way."""
        self._compute_a_little()
        start_s = time.perf_counter()
        placements = self._cache.visit(0, experts, [experts])
        placement = next(placements)
        took_s = time.perf_counter() - start_s
        for slot in placement.slots:
            self._loader.wait(slot)
        placements.close()
        return took_s

    def _second_ahead_s(self, first: int, second: int) -> float:
        """A load ahead while another one is under way."""
        self._compute_a_little()
        self._cache.prefetch(0, first, float("inf"))
        start_s = time.perf_counter()
        self._cache.prefetch(0, second, float("inf"))
        took_s = time.perf_counter() - start_s
        self._visit_s([first, second])
        return took_s

    def _compute_a_little(self) -> None:
        """As a layer would: its threads are still awake when loads are asked for, and the loader is asleep."""
        _core.read_all(self._compute, self._work)
