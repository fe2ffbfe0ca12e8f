"""Hit rates over a whole trace, all sequences in order, caches carried from one to the next; and what replaying costs.

    tidegate trace shared/traces/gpt-oss-20b/trace.npz -o gpt-oss.trace --num-experts 32
    python benchmarks/whole_trace.py gpt-oss.trace [--slots 8]

One line for every policy of the engine (fixed slots) and for Belady's two bounds: hits, and processor seconds for a million layer
events. `simulated` is the whole simulator with its clock, decayed LFU, demand loads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from tidegate.experts.policy import POLICIES
from tidegate.experts.trace import TraceReader
from tidegate.sim.belady import belady_hits
from tidegate.sim.replay import replay, whole_steps
from tidegate.sim.simulate import Profile, simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--slots", type=int, default=8)
    args = parser.parse_args()
    reader = TraceReader(args.trace)
    layers, experts, slots = reader.meta.num_layers, reader.meta.num_experts, [args.slots] * reader.meta.num_layers
    events: list[list[list[int]]] = [[] for _ in slots]
    for step in whole_steps(reader):
        for layer, needed in zip(events, step.needed_L, strict=True):
            layer.append(needed)
    count, visits = len(events[0]) * layers, sum(len(needed) for layer in events for needed in layer)
    print(f"{len(events[0]):,} steps, {count:,} layer events, {args.slots} of {experts} slots", flush=True)

    def report(name: str, hits: Callable[[], int]) -> None:
        began_s = time.process_time()
        found = hits()
        spent_s = time.process_time() - began_s
        print(f"{name:14} {found / visits:7.2%}   {spent_s / count * 1e6:6.1f} s a million events", flush=True)

    for name, bypass in (("belady", False), ("belady-bypass", True)):
        report(name, lambda bypass=bypass: sum(belady_hits(e, args.slots, experts, bypass=bypass) for e in events))
    events.clear()
    for name, policy in POLICIES.items():
        report(name, lambda policy=policy: replay(reader, slots, experts, policy).demand_hits)
    profile, policy = Profile(4 << 20, 4e9, 1e-4, 5e-4), POLICIES["decayed-lfu"]
    report("simulated", lambda: simulate(whole_steps(reader), slots, experts, policy, profile).counters.demand_hits)


if __name__ == "__main__":
    main()
