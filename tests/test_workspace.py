"""The workspace that a plan reserves is what the CPU backend uses, for every family."""

from pathlib import Path

import checkpoints
import pytest
from engines import fixed_process, load_model

from tidegate.checkpoint.convert import convert

__all__ = ["fixed_process"]


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_the_reserved_workspace_is_enough_and_not_much_more(family: str, tmp_path: Path) -> None:
    store = convert(checkpoints.checkpoint(family), tmp_path / "store")
    for chunk, sequences, threads, context in ((64, 1, 1, 128), (16, 3, 3, 60), (1, 1, 2, 128)):
        options = {"prefill_chunk": chunk, "sequences": sequences, "threads": threads, "context": context}
        with load_model(store, **options) as model:
            vocab = model._runtime.config.vocab_size
            prompts = [[(7 * i + j) % vocab for j in range(context - 6)] for i in range(sequences)]
            model.generate(prompts, max_tokens=6, ignore_eos=True)
            model.logits(prompts[0])
            used = model._runtime.engine.decoder.backend.workspace_peak_bytes
            planned = model.plan.needs.workspace_bytes
        assert used <= planned <= 1.3 * used + (128 << 10), (options, used, planned)
