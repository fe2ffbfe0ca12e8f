"""The whole way of the weights: checkpoint -> convert -> store on disk -> loader threads -> slots -> decoder -> logits."""

from pathlib import Path

import pytest

import checkpoints
from in_memory import BACKENDS, TinyModel, aligned, assemble
from test_parity import TOLERANCE, error, oracle, prefill_and_decode, token_ids
from tidegate.checkpoint.convert import ConvertOptions, convert
from tidegate.checkpoint.reading import read_into
from tidegate.checkpoint.store import ExpertStore
from tidegate.engine.dense import DenseSection
from tidegate.experts.cache import ExpertCache
from tidegate.experts.loader import NativeLoader
from tidegate.experts.policy import DecayedLfu
from tidegate.models.moe import Experts


def stored_model(folder: Path, backend: str, capacity: int) -> TinyModel:
    store = ExpertStore.open(folder)
    section = aligned(store.dense_bytes)
    read_into(store.dense_path, 0, section)
    routed = None
    if store.layouts:
        slots = capacity * len(store.layouts)
        views = list(aligned(slots * store.layouts[0].blob_bytes).reshape(slots, -1))
        loader = NativeLoader(store, views)
        cache = ExpertCache([capacity] * len(store.layouts), store.config.moe.num_experts, DecayedLfu, loader)
        routed = Experts(cache, loader, store.layouts)
    return assemble(store.config, DenseSection(store, section), routed, BACKENDS[backend]())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", checkpoints.FAMILIES)
def test_a_converted_checkpoint_agrees_with_transformers(name, backend, tmp_path):
    experts = "auto" if name in checkpoints.DENSE else "f32"
    convert(checkpoints.checkpoint(name), tmp_path / "store", ConvertOptions(experts, "f32"))
    model = stored_model(tmp_path / "store", backend, capacity=5)
    try:
        assert error(prefill_and_decode(model, token_ids()), oracle(name)) < TOLERANCE
    finally:
        if model.decoder.experts is not None:
            model.decoder.experts.slots.close()
