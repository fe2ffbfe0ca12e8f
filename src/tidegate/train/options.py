"""Frozen options of the trainer: the shape of the model, how the router is trained, the schedule.

No torch here: the command line reads this file to make its flags.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from tidegate.errors import UsageError

INT4_GROUP = 32
RouterInput = Literal["plain", "centered", "standard"]


@dataclass(frozen=True)
class Architecture:
    """A Qwen3-MoE model. Defaults are the built-in model: 29 M weights, 7 M of them active."""

    vocab_size: int = 8192
    hidden_size: int = 256
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 32
    num_experts_per_tok: int = 4
    expert_size: int = 128
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    max_positions: int = 1024

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UsageError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if not 0 < self.num_experts_per_tok <= self.num_experts:
            raise UsageError(f"num_experts_per_tok {self.num_experts_per_tok}: 1 to {self.num_experts} are allowed")
        if self.hidden_size % INT4_GROUP or self.expert_size % INT4_GROUP:
            raise UsageError(
                f"hidden_size {self.hidden_size} and expert_size {self.expert_size} must be multiples of {INT4_GROUP}"
            )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class RouterOptions:
    """How the router is kept honest. The differentiable balance loss is alpha * E * sum_e f_e P_e.

    ``balance_scope``: f over the step's tokens ("batch") or over the last ``window_tokens`` tokens, each token's
    weight falling by ``window_decay`` per token ("window"). ``bias_rate`` above 0 balances without a loss: a bias, used
    for the choice and not for the weights, moves by this much per step towards underused experts; such a model has no
    Qwen3-MoE form. ``capacity_factor`` above 0 lets an expert take at most ceil(factor * tokens * k / E) assignments;
    the overflow goes to the next best expert with room. 0 is dropless and unlimited.
    ``temperature_end`` is reached linearly over the first half of the schedule; 1.0 is constant.
    ``input``: the router reads what the experts read ("plain"), that minus its mean over the hidden size ("centered", which
    an export folds into the router), or also divided by its deviation ("standard", which Qwen3-MoE cannot express).
    """

    balance_alpha: float = 0.01
    balance_scope: Literal["batch", "window"] = "batch"
    window_tokens: int = 1024
    window_decay: float = 0.99
    z_loss: float = 0.001
    bias_rate: float = 0.0
    capacity_factor: float = 0.0
    temperature_end: float = 1.0
    init: Literal["normal", "orthogonal"] = "normal"
    input: RouterInput = "plain"

    def __post_init__(self) -> None:
        if self.balance_scope not in ("batch", "window"):
            raise UsageError(f"--balance-scope {self.balance_scope!r}: batch or window")
        if self.init not in ("normal", "orthogonal"):
            raise UsageError(f"--router-init {self.init!r}: normal or orthogonal")
        if self.input not in get_args(RouterInput):
            raise UsageError(f"--router-input {self.input!r}: {', '.join(get_args(RouterInput))} are allowed")
        if self.capacity_factor and self.capacity_factor < 1:
            raise UsageError(
                f"--capacity-factor {self.capacity_factor}: 0 (no limit) or at least 1, or tokens are lost"
            )
        if not 0 < self.temperature_end <= 1:
            raise UsageError(f"--router-temperature-end {self.temperature_end}: more than 0, at most 1")

    def capacity(self, num_tokens: int, architecture: Architecture) -> int:
        """Assignments an expert takes at most, out of ``num_tokens`` tokens."""
        share = num_tokens * architecture.num_experts_per_tok / architecture.num_experts
        return math.ceil(self.capacity_factor * share)


@dataclass(frozen=True)
class TrainOptions:
    """One run. ``steps`` counts optimizer steps of ``batch_sequences`` x ``sequence_length`` tokens.

    The rate warms up over ``warmup_steps``, stays, and falls linearly to zero over the last ``decay_steps``: a run
    stopped in its stable part can be resumed with a smaller ``steps`` and still end well.
    ``qat_from_step`` below 0 means never: from that step on experts compute with their int4 values, and the gradient
    goes straight through to the float32 masters.
    """

    architecture: Architecture = field(default_factory=Architecture)
    router: RouterOptions = field(default_factory=RouterOptions)
    seed: int = 0
    steps: int = 10_000
    batch_sequences: int = 16
    sequence_length: int = 256
    warmup_steps: int = 100
    decay_steps: int = 1500
    matrix_rate: float = 0.02
    other_rate: float = 0.003
    weight_decay: float = 0.02
    qat_from_step: int = -1
    world_size: int = 2
    device: str = "cpu"
    compile: bool = True

    def __post_init__(self) -> None:
        counts = {"steps": self.steps, "batch-sequences": self.batch_sequences, "workers": self.world_size}
        for name, value in (counts | {"sequence-length": self.sequence_length}).items():
            if value < 1:
                raise UsageError(f"--{name} {value}: must be at least 1")
        if self.batch_sequences % self.world_size:
            raise UsageError(
                f"--batch-sequences {self.batch_sequences} must be a multiple of --workers {self.world_size}"
            )
        if self.device != "cpu" and self.world_size != 1:
            raise UsageError(f"--device {self.device} goes with --workers 1 only, not {self.world_size}")
        if self.sequence_length > self.architecture.max_positions:
            raise UsageError(
                f"--sequence-length {self.sequence_length}: the model allows {self.architecture.max_positions} positions"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.batch_sequences * self.sequence_length

    def rate_factor(self, step: int) -> float:
        """Share of the peak rate at ``step``, which counts from 0."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        decay = min(1.0, (self.steps - step) / max(1, self.decay_steps))
        return max(0.0, min(warmup, decay))

    def router_temperature(self, step: int) -> float:
        """Divides the router's logits: 1.0 at step 0, ``temperature_end`` from half of the steps on."""
        progress = min(1.0, step / max(1, self.steps // 2))
        return 1.0 + progress * (self.router.temperature_end - 1.0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(raw: dict[str, Any]) -> TrainOptions:
        """Inverse of :meth:`to_json`. Raises UsageError on unknown names."""
        known = {item.name for item in fields(TrainOptions)}
        unknown = sorted(set(raw) - known)
        if unknown:
            raise UsageError(f"unknown training options in the checkpoint: {', '.join(unknown)}")
        nested = {"architecture": Architecture(**raw["architecture"]), "router": RouterOptions(**raw["router"])}
        return TrainOptions(**{**raw, **nested})
