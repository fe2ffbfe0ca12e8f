"""Every predictor in the live engine: the loads are the simulator's, the answers are nobody's business but the model's, and the
bytes are in the plan."""

from pathlib import Path

import numpy as np
import pytest

from engines import TIMELESS_COUNTERS, fixed_process, load_model
from stores import deepseek_config, qwen_config, write_store
from tidegate import _core
from tidegate.checkpoint.store import ExpertStore
from tidegate.cli import main
from tidegate.errors import BudgetTooSmall, CorruptFile, UsageError
from tidegate.experts import lookahead
from tidegate.experts.cache import ExpertCache
from tidegate.experts.gates_file import fingerprint
from tidegate.experts.loader import NativeLoader
from tidegate.experts.policy import policy_factory
from tidegate.experts.predictor_file import PREDICTORS, PredictorSource, find_predictor, save_predictor
from tidegate.experts.trace import TraceReader
from tidegate.experts.trial import Trial
from tidegate.sim.clock import ClockLoader
from tidegate.sim.fit import fit_predictor
from tidegate.sim.replay import whole_steps
from tidegate.sim.rows import read_rows
from tidegate.sim.semantic import token_vectors
from tidegate.sim.simulate import Profile, simulate

__all__ = ["fixed_process"]
SKETCH = 12
SMALL = {
    "mlp": {"most_tokens": 600, "epochs": 2.0}, "semantic": {"most_tokens": 600, "epochs": 2.0},
    "lstm": {"most_tokens": 200, "epochs": 1}, "window-mlp": {"most_tokens": 200, "epochs": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A store, and kind -> file of what was fitted to its trace."""
    folder = tmp_path_factory.mktemp("fitted")
    store, trace = write_store(folder / "store", qwen_config()), folder / "t.trace"
    rng = np.random.default_rng(3)
    with load_model(store) as model, model.trace(trace, sketch_dims=SKETCH):
        for _ in range(6):
            model.generate(rng.integers(0, 250, 120).tolist(), max_tokens=1)
    reader = TraceReader(trace)
    assert reader.meta.fingerprint == fingerprint(ExpertStore.open(store))
    rows = read_rows(reader, reader.meta.num_experts)
    files = {}
    for kind in PREDICTORS:
        more = {"vector_VS": token_vectors(ExpertStore.open(store))} if kind == "semantic" else {}
        predictor = fit_predictor(kind, rows, **SMALL.get(kind, {}), **more)
        files[kind] = str(folder / f"{kind}.npz")
        save_predictor(Path(files[kind]), predictor, reader.meta.fingerprint)
    return store, files


def _tight(store: Path, predictor: str) -> int:
    with load_model(store, predictor=predictor, sequences=2) as model:
        needs = model.plan.needs
    return needs.budget_for(needs.num_layers * (needs.min_slots + 2))


@pytest.mark.parametrize("kind", PREDICTORS)
def test_the_simulator_issues_the_engines_loads(
    fitted: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What depends on time is fixed: how busy the channel is, and whether a refuted load could still be stopped."""
    store, files = fitted
    for loader in (NativeLoader, ClockLoader):
        monkeypatch.setattr(loader, "busy_ratio", lambda self: 0.2)
    monkeypatch.setattr(ExpertCache, "cancel_refuted", lambda self, layer: None)
    monkeypatch.setattr(Trial, "begin_step", lambda self, num_loads: True)
    monkeypatch.setattr(lookahead, "MOST_OF_SLOTS", 4.0)  # two sequences in layers of very few slots
    path, memory = tmp_path / "t.trace", _tight(store, files[kind])
    with load_model(store, memory=memory, sequences=2, predictor=files[kind]) as model:
        needs, slots = model.plan.needs, model.plan.slots
        with model.trace(path):
            model.generate(
                [[1, 2, 3], [4], list(range(5, 40)), [6, 7]], max_tokens=60, ignore_eos=True, temperature=1.0
            )
        live = model.stats()
        foreseer = model.runtime.experts.foreseer
    reader = TraceReader(path)
    meta = reader.meta
    assert meta.sketch_dims == foreseer.predictor.sketch_dims and meta.guess_reach > 0
    predictor = find_predictor(files[kind], meta.num_layers, meta.num_experts, meta.fingerprint).load()
    profile = Profile(needs.slot_bytes, 1e9, 1e-5, 1e-5)
    found = simulate(
        whole_steps(reader), slots, meta.num_experts, policy_factory("decayed-lfu"), profile, predictor, share=True
    ).counters
    assert {name: getattr(found, name) for name in TIMELESS_COUNTERS} == {
        name: live[name] for name in TIMELESS_COUNTERS
    }
    assert found.prefetch_issued > 0 or kind not in ("mlp", "markov", "next-gate", "token-table")


@pytest.mark.parametrize("kind", PREDICTORS)
def test_answers_do_not_depend_on_it(fitted: tuple[Path, dict[str, str]], kind: str) -> None:
    """With a tight cache and reads of random duration."""
    store, files = fitted
    answers = []
    for options in ({"prefetch": "off"}, {"predictor": files[kind]}):
        reader = _core.FaultyReader(seed=5, max_delay_us=200)
        with load_model(store, reader, memory=_tight(store, files[kind]), sequences=2, **options) as model:
            done = model.generate([[1, 2, 3, 4, 5], [9] * 20], max_tokens=40, ignore_eos=True, logprobs=1)
            model.runtime.cache.check_integrity()
            answers.append([(x.token_id, np.float64(x.logprob).tobytes()) for one in done for x in one.logprobs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["last-token", "window", "decayed", "mlp", "next-gate"])
def test_its_bytes_are_in_the_plan_and_the_ledger(fitted: tuple[Path, dict[str, str]], name: str) -> None:
    store, files = fitted
    predictor = files.get(name, name) if name in ("mlp", "next-gate") else name
    with load_model(store) as model:
        plain = model.plan.needs
    memory = _tight(store, predictor)
    with load_model(store, memory=memory, sequences=2, predictor=predictor) as model:
        needs, accounts = model.plan.needs, model.plan.accounts()
        assert sum(accounts.values()) == memory
        both_bytes = needs.predictor_heap_bytes + needs.predictor_bytes  # gates guess for traces in any case
        assert accounts["predictor"] == both_bytes == model.runtime.ledger.accounts()["predictor"]
        model.generate([[1, 2], [3, 4], [5]], max_tokens=5, ignore_eos=True)
        remembered = model.runtime.experts.foreseer.predictor
        histories = getattr(remembered, "_histories", {})
        assert len(histories) <= 2
        arrays = [getattr(remembered, one) for one in getattr(remembered, "arrays", ())]
        arrays += [value for one in histories.values() for value in vars(one).values() if isinstance(value, np.ndarray)]
        assert sum(np.asarray(one).nbytes for one in arrays) <= needs.predictor_heap_bytes
    assert plain.predictor_heap_bytes == 0 < needs.predictor_heap_bytes < needs.fixed_bytes
    with load_model(store, predictor=predictor) as model:  # everything fits: nothing to foresee
        assert model.runtime.experts.foreseer is None and model.runtime.experts.lookahead is None


def test_a_budget_that_is_too_small_names_the_way_without_it(fitted: tuple[Path, dict[str, str]]) -> None:
    store, files = fitted
    with load_model(store) as model:
        enough = model.plan.needs.smallest_bytes
    load_model(store, memory=enough).close()
    with pytest.raises(BudgetTooSmall, match=r"--predictor gates"):
        load_model(store, memory=enough, predictor=files["mlp"])


def test_what_cannot_be_used_is_named(
    fitted: tuple[Path, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, files = fitted
    other = write_store(tmp_path / "other", ExpertStore.open(store).config, seed=9)
    smaller = write_store(tmp_path / "smaller", deepseek_config())
    with pytest.raises(UsageError, match=r"another model \(routers .*, not .*\)"):
        load_model(other, predictor=files["mlp"])
    with pytest.raises(UsageError, match=r"was fitted to .* layers of .* experts, not"):
        load_model(smaller, predictor=files["mlp"])
    with pytest.raises(UsageError, match="fitted first"):
        load_model(store, predictor="mlp")
    with pytest.raises(UsageError, match="--predictor decayed has no effect: --prefetch is off"):
        load_model(store, predictor="decayed", prefetch="off")
    broken = tmp_path / "broken.npz"
    broken.write_bytes(Path(files["mlp"]).read_bytes()[:-200])
    with pytest.raises(CorruptFile, match="broken"):
        load_model(store, predictor=str(broken))
    assert main(["run", str(other), "x", "--memory", "1GiB", "--context", "64", "--predictor", files["mlp"]]) == 2
    error = capsys.readouterr().err
    assert "another model" in error and len(error.splitlines()) == 1


def test_a_predictor_that_looks_at_states_asks_for_its_sketches(
    fitted: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    store, files = fitted
    assert PredictorSource.open(Path(files["next-gate"])).sketch_dims == SKETCH
    options = {"memory": _tight(store, files["next-gate"]), "predictor": files["next-gate"]}
    with (
        load_model(store, **options) as model,
        pytest.raises(UsageError, match=f"needs {SKETCH}"),
        model.trace(tmp_path / "t.trace", sketch_dims=SKETCH + 1),
    ):
        raise AssertionError
    with load_model(store) as model, model.trace(tmp_path / "plain.trace"):
        model.generate([1, 2, 3], max_tokens=20, ignore_eos=True)
    meta = TraceReader(tmp_path / "plain.trace").meta
    predictor = find_predictor(files["next-gate"], meta.num_layers, meta.num_experts).load()
    steps = whole_steps(TraceReader(tmp_path / "plain.trace"))
    with pytest.raises(UsageError, match=f"--sketch {SKETCH}"):
        simulate(
            steps, [4] * meta.num_layers, meta.num_experts, policy_factory("lru"), Profile(1, 1.0, 1.0, 1.0), predictor
        )
