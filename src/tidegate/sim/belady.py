"""Belady's optimal replacement for atomic events: the offline bound that causal policies are compared with.

An event is the set of experts that one step needs of one layer. *Forced* admission: every needed expert gets a slot.
*Bypass*: an expert that will not be used again soon enough may be computed from staging and dropped. Both evict the
expert whose next use is farthest away (Belady 1966).
"""

from __future__ import annotations

from collections.abc import Sequence

_NEVER = 1 << 60


def next_uses(events: Sequence[Sequence[int]], num_experts: int) -> list[list[int]]:
    """For each event and each of its experts: index of the next event that needs it, or a huge number."""
    upcoming = [_NEVER] * num_experts
    out: list[list[int]] = [[] for _ in events]
    for index in range(len(events) - 1, -1, -1):
        out[index] = [upcoming[expert] for expert in events[index]]
        for expert in events[index]:
            upcoming[expert] = index
    return out


def belady_hits(events: Sequence[Sequence[int]], capacity: int, num_experts: int, *, bypass: bool) -> int:
    """Hits of one layer's events with ``capacity`` slots. With forced admission an event larger than the capacity keeps
    its soonest reused experts."""
    resident: dict[int, int] = {}
    hits = 0
    for needed, upcoming in zip(events, next_uses(events, num_experts), strict=True):
        hits += sum(expert in resident for expert in needed)
        resident.update(zip(needed, upcoming, strict=True))
        protected = () if bypass or len(needed) > capacity else set(needed)
        while len(resident) > capacity:
            candidates = [expert for expert in resident if expert not in protected]
            del resident[max(candidates, key=lambda expert: (resident[expert], expert))]
    return hits
