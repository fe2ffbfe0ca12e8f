"""The split of the budget, made before any weight is read: what everybody needs, then expert slots from the rest.

Integers only. ``Needs`` holds the bytes of one model with one set of options; ``make_plan`` turns them and a budget
into a ``Plan`` or raises BudgetTooSmall with the smallest budget that works and the flags that would help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.errors import BudgetTooSmall
from tidegate.units import format_bytes

# Room for what a process uses outside its own pages and for what differs from run to run: kernel structures and page
# tables count against a cgroup's limit. Page tables take 1/512 of memory where the kernel has no huge pages to give.
HEADROOM_BYTES = 2 << 20
HEADROOM_SHIFT = 9


@dataclass(frozen=True)
class Needs:
    """Bytes by owner. ``runtime_bytes`` is the measured process before the arena, ``growth_bytes`` what it grows by
    later; ``slot_bytes`` is one expert's blob, ``min_slots`` what one token needs of each of ``num_layers`` MoE layers.
    ``start_peak_bytes``: the most the process has used already, reading a large tokenizer or converting; ``predictor_bytes``:
    matrices that correct the gates' guesses; ``predictor_heap_bytes``: a predictor, which is not in the arena."""

    runtime_bytes: int
    growth_bytes: int
    dense_bytes: int
    kv_bytes: int
    workspace_bytes: int
    slot_bytes: int
    num_layers: int
    num_experts: int
    min_slots: int
    start_peak_bytes: int = 0
    predictor_bytes: int = 0
    predictor_heap_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Everything but expert slots and headroom."""
        return (
            self.runtime_bytes
            + self.growth_bytes
            + self.dense_bytes
            + self.kv_bytes
            + self.workspace_bytes
            + self.predictor_bytes
            + self.predictor_heap_bytes
        )

    def accounts(self, budget_bytes: int, slots_bytes: int) -> dict[str, int]:
        """What becomes of a budget with these expert slots, by owner; adds up to it."""
        return {
            "runtime": self.runtime_bytes + self.growth_bytes,
            "dense weights": self.dense_bytes,
            "KV cache": self.kv_bytes,
            "expert slots": slots_bytes,
            "workspace": self.workspace_bytes,
            "predictor": self.predictor_bytes + self.predictor_heap_bytes,
            "headroom": budget_bytes - self.fixed_bytes - slots_bytes,
        }

    def budget_for(self, num_slots: int) -> int:
        """The smallest budget that leaves room for ``num_slots`` expert slots."""
        used = self.fixed_bytes + num_slots * self.slot_bytes + HEADROOM_BYTES
        budget = used
        while budget - (budget >> HEADROOM_SHIFT) < used:
            budget = used + (budget >> HEADROOM_SHIFT)
        return budget

    @property
    def smallest_bytes(self) -> int:
        return max(self.smallest_to_run_bytes, self.start_peak_bytes)

    @property
    def smallest_to_run_bytes(self) -> int:
        """Without regard to what the start has used already."""
        return self.budget_for(self.num_layers * self.min_slots)

    @property
    def largest_useful_bytes(self) -> int:
        """The budget at which every expert has a slot; more changes nothing."""
        return self.budget_for(self.num_layers * self.num_experts)


@dataclass(frozen=True)
class WayOut:
    """A flag that lowers the smallest budget, and what the smallest budget becomes with it."""

    flag: str
    smallest_bytes: int


@dataclass(frozen=True)
class Plan:
    """How a budget is split. ``slots[l]`` expert slots serve MoE layer l; ``headroom_bytes`` stays unused."""

    budget_bytes: int
    needs: Needs
    slots: tuple[int, ...]

    @property
    def slots_bytes(self) -> int:
        return sum(self.slots) * self.needs.slot_bytes

    @property
    def arena_bytes(self) -> int:
        """What is allocated as one block."""
        needs = self.needs
        return self.planned_bytes - needs.runtime_bytes - needs.growth_bytes - needs.predictor_heap_bytes

    @property
    def planned_bytes(self) -> int:
        """What the process is expected to use in the end; the ledger's total."""
        return self.needs.fixed_bytes + self.slots_bytes

    @property
    def headroom_bytes(self) -> int:
        return self.budget_bytes - self.planned_bytes

    @property
    def least_headroom_bytes(self) -> int:
        """The part of the headroom that is kept for the unforeseen; the rest is simply free."""
        return HEADROOM_BYTES + (self.budget_bytes >> HEADROOM_SHIFT)

    @property
    def resident_ratio(self) -> float:
        """Share of the routed experts that have a slot; 1 for a model without experts."""
        total = self.needs.num_layers * self.needs.num_experts
        return sum(self.slots) / total if total else 1.0

    def accounts(self) -> dict[str, int]:
        """Bytes by owner, in the order of the card; they add up to the budget."""
        return self.needs.accounts(self.budget_bytes, self.slots_bytes)

    def to_json(self) -> dict[str, Any]:
        return {
            "budget_bytes": self.budget_bytes,
            "accounts_bytes": self.accounts(),
            "slots_per_layer": list(self.slots),
            "num_experts": self.needs.num_experts,
            "resident_ratio": round(self.resident_ratio, 4),
            "smallest_bytes": self.needs.smallest_bytes,
            "largest_useful_bytes": self.needs.largest_useful_bytes,
        }


def make_plan(budget_bytes: int, needs: Needs, ways_out: Sequence[WayOut] = ()) -> Plan:
    """Split the budget. Raises BudgetTooSmall when not even the smallest set of slots fits."""
    if budget_bytes < needs.smallest_bytes:
        raise BudgetTooSmall(budget_bytes, needs.smallest_bytes, _hint(budget_bytes, needs, ways_out))
    room = budget_bytes - (budget_bytes >> HEADROOM_SHIFT) - HEADROOM_BYTES - needs.fixed_bytes
    return Plan(budget_bytes, needs, spread(room // needs.slot_bytes if needs.num_layers else 0, needs))


def spread(num_slots: int, needs: Needs) -> tuple[int, ...]:
    """Slots evenly over the layers, never more than a layer has experts. The remainder goes to the first layers, whose
    hit rates are the lowest."""
    if not needs.num_layers:
        return ()
    each, rest = divmod(min(num_slots, needs.num_layers * needs.num_experts), needs.num_layers)
    return tuple(each + (layer < rest) for layer in range(needs.num_layers))


def _hint(budget_bytes: int, needs: Needs, ways_out: Sequence[WayOut]) -> str:
    if budget_bytes >= needs.smallest_to_run_bytes:
        return "the start used that much already; if it converted a checkpoint, run again: that is done once"
    useful = sorted(
        (way for way in ways_out if way.smallest_bytes < needs.smallest_bytes), key=lambda w: w.smallest_bytes
    )
    enough = [way for way in useful if way.smallest_bytes <= budget_bytes]
    if enough:
        return "it fits with " + " or ".join(way.flag for way in enough)
    if useful:
        return "needs less: " + ", ".join(f"{w.flag} {format_bytes(w.smallest_bytes)}" for w in useful)
    return "raise --memory"
