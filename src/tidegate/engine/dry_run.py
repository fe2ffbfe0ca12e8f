"""The largest step, once, before the first request: what activations really take of the workspace.

Layers that are alike take the same, so it goes through one of each kind. Nothing is read: experts are the zeros that an arena
holds at first. T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tidegate import _core
from tidegate.backends.operands import ByteArray, ExpertSlots, StepBatch
from tidegate.engine.activation_peak import Peak
from tidegate.engine.needs import Sizes
from tidegate.errors import OverBudget
from tidegate.experts.base import InstantLoader
from tidegate.experts.cache import ExpertCache
from tidegate.experts.policy import policy_factory
from tidegate.model_config import ModelConfig
from tidegate.models.decoder import Decoder
from tidegate.models.moe import Experts
from tidegate.models.weights import ModelWeights
from tidegate.plan import Plan
from tidegate.quant.layout import ExpertLayout

if TYPE_CHECKING:
    from tidegate.backends.cpu import CpuBackend

# The prompt's last token is at this position at most: behind it the step takes longer, but hardly more memory, and what grows
# (partial results of attention) is counted.
MOST_POSITIONS = 16_384


def activation_peak(
    weights: ModelWeights,
    layers: Sequence[int],
    config: ModelConfig,
    backend: CpuBackend,
    experts: Experts | None,
    sizes: Sizes,
) -> Peak:
    """Of the largest step, through ``layers``. Writes into KV pages; ``backend`` has computed nothing yet."""
    chosen = replace(weights, layers=tuple(weights.layers[layer] for layer in layers))
    try:
        Decoder(config, chosen, backend, experts).forward(_largest_step(sizes))
    except OverBudget as error:
        return Peak(backend.workspace_bytes - error.free_bytes + error.asked_bytes, is_whole=False)
    return Peak(backend.workspace_peak_bytes, is_whole=True)


def zero_experts(slots: ByteArray, plan: Plan, layouts: Sequence[ExpertLayout]) -> Experts:
    """Every expert is there as soon as it is asked for: whatever its slot holds."""
    size, needs = plan.needs.slot_bytes, plan.needs
    cache = ExpertCache(plan.slots, needs.num_experts, policy_factory("lru"), InstantLoader())
    return Experts(cache, _ReadySlots([slots[start : start + size] for start in range(0, slots.size, size)]), layouts)


class _ReadySlots(ExpertSlots):
    def __init__(self, views: list[ByteArray]) -> None:
        self._views, self.native = views, _core.ReadySlots(views)

    def wait(self, slot: int) -> ByteArray:
        return self._views[slot]


def _largest_step(sizes: Sizes) -> StepBatch:
    """A chunk of one sequence's prompt, and a token of every other sequence."""
    end = max(sizes.prefill_chunk, min(sizes.context_tokens, MOST_POSITIONS))
    counts = [sizes.prefill_chunk] + [1] * (sizes.sequences - 1)
    pages = np.arange(sizes.num_pages, dtype=np.int32).reshape(sizes.sequences, -1)
    return StepBatch(
        token_ids_T=np.zeros(sum(counts), np.int32),
        positions_T=np.concatenate([np.arange(end - count, end, dtype=np.int32) for count in counts]),
        sequence_T=np.repeat(np.arange(sizes.sequences, dtype=np.int32), counts),
        block_tables=pages,
        logit_rows_R=np.cumsum(counts, dtype=np.int32) - 1,
    )
