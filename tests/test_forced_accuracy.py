"""Prefetch with a predictor that is wrong half of the time, in a tight cache: bytes are counted, time is not."""

from pathlib import Path

import numpy as np
import pytest

from engines import fixed_process, load_model
from stores import qwen_config, write_store
from tidegate import _core
from tidegate.engine.model import Model
from tidegate.experts.trace import TraceReader
from tidegate.experts.trial import Trial
from tidegate.sim.oracle import ForcedGuesses

__all__ = ["fixed_process"]
TOKENS = 250


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An expert has 55 KB."""
    config = qwen_config(
        hidden_size=256, moe_intermediate_size=128, num_hidden_layers=4, num_experts=32, num_experts_per_tok=4
    )
    return write_store(tmp_path_factory.mktemp("forced") / "store", config)


def _load(store: Path, prefetch: str) -> Model:
    with load_model(store) as model:
        needs = model.plan.needs
    memory = needs.budget_for(needs.num_layers * 8)
    return load_model(store, _core.FaultyReader(seed=2, max_delay_us=100), memory=memory, prefetch=prefetch)


def _run(model: Model) -> tuple[list[int], dict[str, int]]:
    answer = model.generate([7], max_tokens=TOKENS, ignore_eos=True, temperature=1.0, seed=4)
    model.runtime.cache.check_integrity()
    return answer.token_ids, model.stats()


@pytest.fixture(scope="module")
def off(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], dict[str, int], np.ndarray]:
    """Answer, counters and routing without prefetch."""
    path = tmp_path_factory.mktemp("trace") / "t.trace"
    with _load(store, "off") as model, model.trace(path):
        answer, stats = _run(model)
    return answer, stats, np.concatenate([chunk.experts for chunk in TraceReader(path)])


@pytest.mark.parametrize("busy_ratio", [0.1, 0.5, 0.95])
def test_half_wrong_guesses_cost_hardly_a_byte(
    store: Path, off: tuple[list[int], dict[str, int], np.ndarray], busy_ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However idle the channel is: an idle one is no reason to read in vain."""
    monkeypatch.setattr("tidegate.experts.loader.NativeLoader.busy_ratio", lambda self: busy_ratio)
    monkeypatch.setattr(Trial, "begin_step", lambda self, num_loads: True)
    answer, without, routing = off
    with _load(store, "auto") as model:
        runtime = model.runtime
        runtime.experts.guesser = ForcedGuesses(routing, 32, 0.5, lambda: runtime.engine.times.steps)
        same, stats = _run(model)
    assert same == answer
    assert stats["read_bytes"] <= 1.05 * without["read_bytes"]
    rate = stats["prefetch_dropped"] / (stats["prefetch_dropped"] + stats["prefetch_issued"])
    print(f"busy {busy_ratio}: {stats['read_bytes'] / without['read_bytes']:.3f} of the bytes, {rate:.0%} dropped")
    assert 0 < rate < 1


def test_right_guesses_are_loaded_and_wasted_little(
    store: Path, off: tuple[list[int], dict[str, int], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.experts.loader.NativeLoader.busy_ratio", lambda self: 0.5)
    monkeypatch.setattr(Trial, "begin_step", lambda self, num_loads: True)
    answer, without, routing = off
    with _load(store, "auto") as model:
        runtime = model.runtime
        runtime.experts.guesser = ForcedGuesses(routing, 32, 0.95, lambda: runtime.engine.times.steps)
        same, stats = _run(model)
    assert same == answer
    assert stats["prefetch_hits"] > without["misses"] / 2
    assert stats["prefetch_wasted"] <= 0.25 * stats["prefetch_issued"]
