"""How many prompt tokens a step takes when nobody says: more where every step would load the experts again."""

from pathlib import Path

import pytest

from engines import fixed_process, load_model
from stores import qwen_config, write_store
from tidegate.engine.needs import CHUNK_BUDGET_SHARE, DEFAULT_CHUNK_TOKENS, LARGER_CHUNKS_TOKENS

__all__ = ["fixed_process"]
LAYERS = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = qwen_config(hidden_size=32, moe_intermediate_size=256, num_experts=128)
    return write_store(tmp_path_factory.mktemp("chunk") / "store", config)


def _chunk(store: Path, slots: int, **options: object) -> int:
    """What the engine takes with room for ``slots`` slots beside the usual chunk."""
    with load_model(store, context=1024, prefill_chunk=DEFAULT_CHUNK_TOKENS) as model:
        memory = model.plan.needs.budget_for(slots)
    with load_model(store, **{"context": 1024, "memory": memory, **options}) as model:
        assert model.plan.needs.smallest_bytes <= memory
        return model.runtime.sizes.prefill_chunk


def test_the_usual_chunk_where_everything_fits_or_hardly_anything(store: Path) -> None:
    assert _chunk(store, 128 * LAYERS) == DEFAULT_CHUNK_TOKENS
    assert _chunk(store, 4 * LAYERS) == DEFAULT_CHUNK_TOKENS


def test_a_larger_one_where_it_takes_little_of_the_budget(store: Path) -> None:
    larger = _chunk(store, 60 * LAYERS)
    assert larger in LARGER_CHUNKS_TOKENS
    with load_model(store, context=1024, prefill_chunk=DEFAULT_CHUNK_TOKENS) as model:
        usual, budget = model.plan.needs.fixed_bytes, model.plan.needs.budget_for(60 * LAYERS)
    with load_model(store, context=1024, prefill_chunk=larger) as model:
        assert model.plan.needs.fixed_bytes - usual <= budget // CHUNK_BUDGET_SHARE


def test_never_longer_than_the_context_and_never_against_the_flag(store: Path) -> None:
    assert _chunk(store, 60 * LAYERS, context=600) in (DEFAULT_CHUNK_TOKENS, 512)
    assert _chunk(store, 60 * LAYERS, prefill_chunk=64) == 64
