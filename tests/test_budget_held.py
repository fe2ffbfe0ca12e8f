"""The budget holds whatever the prompts do: disjoint experts, a prefill that touches all of them, full contexts."""

from pathlib import Path

import pytest

from engines import fixed_process, load_model, smallest_budget
from stores import qwen_config, write_store
from tidegate.engine.model import Model
from tidegate.errors import BudgetTooSmall, OverBudget
from tidegate.experts.cache import ExpertCache

__all__ = ["fixed_process"]
EVEN, ODD = list(range(0, 200, 2)), list(range(1, 200, 2))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Routing by parity of the token id: two disjoint halves of the experts."""
    config = qwen_config(num_hidden_layers=4, num_experts=24, num_experts_per_tok=3)
    return write_store(tmp_path_factory.mktemp("parity") / "store", config, parity=True)


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, frozenset[int]]]:
    """(layer, distinct experts) of every visit from now on."""
    seen: list[tuple[int, frozenset[int]]] = []
    visit = ExpertCache.visit

    def recording(self, layer, needed, rows=()):
        seen.append((layer, frozenset(needed)))
        assert len(set(needed)) == len(needed)
        return visit(self, layer, needed, rows)

    monkeypatch.setattr(ExpertCache, "visit", recording)
    return seen


def _load_at_smallest(store: Path, **options: object) -> Model:
    """A model with top-k slots a layer."""
    model = load_model(store, memory=smallest_budget(store, **options), **options)
    assert set(model.plan.slots) == {3}
    return model


def test_a_second_prompt_with_disjoint_experts(store: Path, visits: list) -> None:
    with _load_at_smallest(store) as model:
        ledger = model._runtime.ledger
        before = ledger.accounts()
        visits.clear()  # of the dry run
        model.generate(EVEN, max_tokens=1)
        first = set().union(*(experts for _, experts in visits))
        visits.clear()
        model.generate(ODD, max_tokens=1)
        second = set().union(*(experts for _, experts in visits))
        assert len(first) > 6 and len(second) > 6 and not first & second
        assert ledger.accounts() == before
        model._runtime.ledger.check()


@pytest.mark.parametrize("prefetch", ["off", "auto"])
def test_prefill_of_1300_tokens_touches_every_expert_once_a_chunk(store: Path, visits: list, prefetch: str) -> None:
    prompt = [(i * 37) % 200 for i in range(1300)]
    with _load_at_smallest(store, context=1400, prefill_chunk=256, prefetch=prefetch) as model:
        visits.clear()  # of the dry run
        assert model.generate(prompt, max_tokens=2, ignore_eos=True).finish_reason == "length"
        counters, loads = model._runtime.cache.counters, model._runtime.loader.counters()
        ledger = model._runtime.ledger
        ledger.check()
    layers = {layer for layer, _ in visits}
    assert all(frozenset().union(*(e for la, e in visits if la == layer)) == frozenset(range(24)) for layer in layers)
    assert len(visits) == 4 * 6, "six chunks; the decode step's visits are native"
    # A speculative load that is asked for while it runs counts among the loader's demand loads.
    assert counters.misses <= loads.demand_loads <= counters.misses + counters.prefetch_hits
    assert loads.demand_loads <= sum(len(experts) for _, experts in visits) + 4 * 3
    if prefetch == "off":
        assert loads.demand_loads == counters.misses and counters.prefetch_issued == 0
    assert counters.misses > 4 * 24, "slots are few, so experts come back"


def test_four_sequences_grow_to_full_context(store: Path) -> None:
    with _load_at_smallest(store, sequences=4, context=96, prefill_chunk=16) as model:
        done = model.generate([EVEN[:20], ODD[:40], EVEN[:1], ODD[:70]], ignore_eos=True)
        assert [len(d.token_ids) + d.num_prompt_tokens for d in done] == [96] * 4
        runtime = model._runtime
        runtime.engine.scheduler.kv.check_integrity()
        assert runtime.engine.scheduler.kv.num_free == runtime.sizes.num_pages == 4 * 6
        runtime.ledger.check()


def test_logits_beyond_what_is_free_are_refused(store: Path) -> None:
    with _load_at_smallest(store, context=2000) as model, pytest.raises(OverBudget, match="logits asked for"):
        model.logits([1] * 1999)
    with load_model(store, context=2000) as model:
        assert model.logits([1] * 1999).shape == (1999, 258)
        assert model._runtime.ledger.accounts()["logits"] == 0


def test_the_refusal_names_what_would_fit(tmp_path: Path) -> None:
    config = qwen_config(hidden_size=128, num_experts=8, moe_intermediate_size=128)
    store = write_store(tmp_path / "store", config, experts="bf16", dense="bf16")
    options = {"context": 2048, "kv": "f32", "sequences": 4}
    smallest = smallest_budget(store, **options)
    with pytest.raises(BudgetTooSmall) as caught:
        load_model(store, memory=smallest - 1, **options)
    flags = (
        "--context 1024",
        "--prefill-chunk 128",
        "--sequences 1",
        "--kv f16",
        "--experts int4 (when",
        "--dense int4 (when",
    )
    assert "it fits with" in str(caught.value) and all(flag in str(caught.value) for flag in flags)
    with pytest.raises(BudgetTooSmall) as caught:
        load_model(store, memory=1 << 20, **options)
    assert "needs less" in str(caught.value) and "--context 256" in str(caught.value)


def test_one_byte_under_the_smallest_budget_is_refused_before_any_weight_is_read(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = smallest_budget(store)
    load_model(store, memory=smallest).close()
    monkeypatch.setattr("tidegate.engine.build.Arena.__init__", None)
    with pytest.raises(BudgetTooSmall, match="too small by 1 B"):
        load_model(store, memory=smallest - 1)
