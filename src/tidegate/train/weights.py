"""Where the numbers live: float32 masters, what the forward pass computes with, and gradients, in flat buffers.

E experts, F expert width, D hidden size, V vocabulary, N/K outputs and inputs of a projection.
Matrices and the embedding are computed with in bfloat16; routers and norms stay in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from tidegate.train.options import Architecture, RouterOptions

Kind = Literal["matrix", "expert", "embedding", "router", "norm"]
BOOST_FIRST_COLUMN = 4.0


@dataclass(frozen=True)
class Parameter:
    """One named tensor. ``scale`` is the standard deviation at initialisation (norms start at one)."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    scale: float

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def parameters_of(architecture: Architecture) -> list[Parameter]:
    """Every tensor, in a fixed order. Fused: ``qkv`` is [Q+2KV, D], ``gate_up`` is [E, 2F, D], ``down`` [E, D, F]."""
    D, F, E = architecture.hidden_size, architecture.expert_size, architecture.num_experts
    into, residual = D**-0.5, (2 * architecture.num_layers) ** -0.5
    result = [Parameter("embedding", "embedding", (architecture.vocab_size, D), 0.02)]
    for layer in range(architecture.num_layers):
        at = f"layers.{layer}."
        result += [
            Parameter(at + "attention_norm", "norm", (D,), 0.0),
            Parameter(at + "qkv", "matrix", (architecture.query_size + 2 * architecture.kv_size, D), into),
            Parameter(at + "query_norm", "norm", (architecture.head_dim,), 0.0),
            Parameter(at + "key_norm", "norm", (architecture.head_dim,), 0.0),
            Parameter(at + "output", "matrix", (D, architecture.query_size), architecture.query_size**-0.5 * residual),
            Parameter(at + "moe_norm", "norm", (D,), 0.0),
            Parameter(at + "router", "router", (E, D), 0.02),
            Parameter(at + "gate_up", "expert", (E, 2 * F, D), into),
            Parameter(at + "down", "expert", (E, D, F), F**-0.5 * residual),
        ]
    return [*result, Parameter("final_norm", "norm", (D,), 0.0)]


Role = Literal["master", "weight", "gradient"]
_HALF_KINDS: dict[str, tuple[str, ...]] = {
    "master": (),
    "weight": ("matrix", "expert", "embedding"),
    "gradient": ("matrix", "expert"),  # the embedding's gradient is summed up from many small pieces
}


class Buffers:
    """One value of every parameter: masters (all float32), weights to compute with, or gradients, in two flat tensors."""

    def __init__(self, parameters: list[Parameter], role: Role, *, device: str = "cpu", shared: bool = False) -> None:
        self._parameters, self._half_kinds = parameters, _HALF_KINDS[role]
        halves = sum(item.size for item in parameters if item.kind in self._half_kinds)
        fulls = sum(item.size for item in parameters) - halves
        self.half = torch.zeros(halves, dtype=torch.bfloat16, device=device)
        self.full = torch.zeros(fulls, dtype=torch.float32, device=device)
        if shared:
            self.half.share_memory_()
            self.full.share_memory_()

    def views(self) -> dict[str, torch.Tensor]:
        """Named views, which share memory with the flat tensors."""
        result, at_half, at_full = {}, 0, 0
        for item in self._parameters:
            if item.kind in self._half_kinds:
                result[item.name] = self.half[at_half : at_half + item.size].view(item.shape)
                at_half += item.size
            else:
                result[item.name] = self.full[at_full : at_full + item.size].view(item.shape)
                at_full += item.size
        return result


def initialise(
    masters: dict[str, torch.Tensor], parameters: list[Parameter], options: RouterOptions, seed: int
) -> None:
    """Fill the masters in place, from ``seed`` alone (the generator is the CPU's, on any device)."""
    generator = torch.Generator().manual_seed(seed)
    for item in parameters:
        if item.kind == "norm":
            value = torch.ones(item.shape)
        elif item.kind == "router" and options.init == "orthogonal":
            value = torch.linalg.qr(torch.randn(item.shape[::-1], generator=generator))[0].T.contiguous()
            value *= item.scale * math.sqrt(item.shape[1])
            value[:, 0] *= BOOST_FIRST_COLUMN
        else:
            value = torch.randn(item.shape, generator=generator) * item.scale
        masters[item.name].copy_(value)
