"""The workspace that a plan reserves is what the CPU backend uses, for every family."""

from pathlib import Path

import pytest

import checkpoints
from engines import fixed_process, load_model
from stores import deepseek_config, qwen_config, write_store
from tidegate.checkpoint.convert import convert
from tidegate.engine.needs import activations_of

__all__ = ["fixed_process"]


def _check(store: Path, context: int, **options: int) -> None:
    with load_model(store, context=context, **options) as model:
        vocab = model._runtime.config.vocab_size
        prompts = [[(7 * i + j) % vocab for j in range(context - 6)] for i in range(options["sequences"])]
        model.generate(prompts, max_tokens=6, ignore_eos=True)
        model.logits(prompts[0][:40])
        used = model._runtime.engine.decoder.backend.workspace_peak_bytes
        planned = model.plan.needs.workspace_bytes
        counted = activations_of(model._runtime.store, model._runtime.sizes, options["threads"])
    assert (
        counted.peak_bytes <= planned < counted.peak_bytes + (4 << 20) and counted.unshared_bytes > counted.peak_bytes
    )
    assert used <= planned <= 1.3 * used + (256 << 10), (options, used, planned)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_the_reserved_workspace_is_enough_and_not_much_more(family: str, tmp_path: Path) -> None:
    store = convert(checkpoints.checkpoint(family), tmp_path / "store")
    for chunk, sequences, threads, context in ((64, 1, 1, 128), (16, 3, 3, 60), (1, 1, 2, 128)):
        _check(store, context, prefill_chunk=chunk, sequences=sequences, threads=threads)


@pytest.mark.parametrize("config", [qwen_config(), deepseek_config()], ids=["qwen3_moe", "deepseek_v2"])
def test_long_contexts_that_are_split_over_threads(config: object, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", config)  # type: ignore[arg-type]
    for chunk, threads in ((1, 6), (7, 4), (200, 4)):
        _check(store, 1300 if chunk == 1 else 2000, prefill_chunk=chunk, sequences=1, threads=threads)
