"""A model on a machine as the simulator's clock wants it: the planner's seconds, layer by layer."""

from __future__ import annotations

from tidegate.config import EngineOptions
from tidegate.engine.needs import PackedModel, needs_of, sizes_of
from tidegate.errors import UsageError
from tidegate.experts.gates_file import GATES_FORMAT
from tidegate.plan import make_plan
from tidegate.planner.card import expected_process
from tidegate.planner.machine import Machine
from tidegate.planner.step_clock import StepClock
from tidegate.sim.simulate import Profile


def simulated_profile(model: PackedModel, options: EngineOptions, machine: Machine, threads: int) -> Profile:
    """Decode steps of one token at half the context. Dense layers, should there be any, count with the MoE layers. Raises
    UsageError for a model without experts."""
    config, moe = model.config, model.config.moe
    if moe is None or not model.layouts:
        raise UsageError("--model: this model has no experts, so there is nothing to simulate")
    needs = needs_of(model, options, expected_process(machine, config.vocab_size), threads)
    plan = make_plan(needs.largest_useful_bytes, needs)
    clock = StepClock(model, plan, sizes_of(config, options), machine, threads, prefetch=False)
    step = clock.decode(1.0, None)
    head = model.dense["embed" if config.tied_embeddings else "head"]
    head_s = head.nbytes / clock.bytes_per_s(head.fmt, 1)
    layers, nbytes = config.num_moe_layers, needs.slot_bytes
    bandwidth = machine.disk_bytes_per_s(nbytes)
    gate_bytes = GATES_FORMAT.packed_bytes(moe.num_experts, config.hidden_size)
    return Profile(
        nbytes,
        bandwidth,
        expert_s=step.experts_s / (layers * moe.num_experts_per_tok),
        dense_s=max(0.0, step.weights_s - head_s + step.kv_s + step.overhead_s) / layers,
        token_s=head_s,
        wake_s=machine.bookkeeping.wake_s,
        first_read_s=machine.first_read_s(nbytes),
        rouse_s=machine.bookkeeping.rouse_s,
        miss_s=machine.bookkeeping.miss_s,
        ahead_s=machine.bookkeeping.ahead_s,
        strain_s=machine.bookkeeping.strain_s,
        load_beside_ratio=machine.beside_bytes_per_s(nbytes) / bandwidth,
        compute_beside_ratio=machine.beside_loads_ratio,
        access_s=machine.bookkeeping.access.of(moe.num_experts_per_tok),
        weigh_s=machine.bookkeeping.gate.each_s,
        predict_s=machine.bookkeeping.gate.base_s + gate_bytes / clock.bytes_per_s(GATES_FORMAT, 1),
    )
