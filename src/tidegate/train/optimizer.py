"""Muon for the matrices, AdamW for embedding, routers and norms; each worker updates its own share of the parameters.

Muon (Jordan et al. 2024): the momentum of a matrix is replaced by the nearest semi-orthogonal matrix, found by five
Newton-Schulz steps. Experts are treated one by one, with gate and up apart, in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidegate.train.options import Architecture, TrainOptions
from tidegate.train.quantization import fake_int4
from tidegate.train.weights import Parameter

MOMENTUM = 0.95
BETAS = (0.9, 0.95)
EPSILON = 1e-8
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Singular values of each [N, K] matrix of a batch pushed to about one, in bfloat16. Wants N <= K."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices.bfloat16()
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).to(x.dtype) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def as_matrices(parameter: Parameter, tensor: torch.Tensor, architecture: Architecture) -> torch.Tensor:
    """View (or transposed view) of a parameter as a batch of [N, K] matrices with N <= K."""
    if parameter.name.endswith("qkv"):
        tensor = tensor.view(-1, architecture.kv_size, tensor.shape[-1])
    elif parameter.name.endswith("gate_up"):
        tensor = tensor.view(-1, architecture.expert_size, tensor.shape[-1])
    elif tensor.dim() == 2:
        tensor = tensor[None]
    return tensor if tensor.shape[-2] <= tensor.shape[-1] else tensor.transpose(-1, -2)


def share_out(parameters: list[Parameter], world_size: int) -> list[list[Parameter]]:
    """Parameters of each worker: largest first, always to the worker with the least work."""
    loads, shares = [0.0] * world_size, [[] for _ in range(world_size)]  # type: ignore[var-annotated]
    for item in sorted(parameters, key=lambda item: -item.size):
        rank = min(range(world_size), key=loads.__getitem__)
        loads[rank] += item.size
        shares[rank].append(item)
    return shares


class Optimizer:
    """Updates ``parameters`` (a worker's share) from all workers' gradients. State lives in the given named tensors."""

    def __init__(
        self,
        options: TrainOptions,
        parameters: list[Parameter],
        masters: dict[str, torch.Tensor],
        moments: dict[str, torch.Tensor],
        squares: dict[str, torch.Tensor],
        weights: dict[str, torch.Tensor],
        gradients: Sequence[dict[str, torch.Tensor]],
    ) -> None:
        """``moments`` and ``squares`` are float32, named like the masters; Muon leaves ``squares`` alone."""
        self._options, self._parameters = options, parameters
        self._masters, self._moments, self._squares = masters, moments, squares
        self._weights, self._gradients = weights, gradients

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Apply optimizer step number ``step`` (from 0): masters, moments and weights change in place."""
        factor = self._options.rate_factor(step)
        for item in self._parameters:
            gradient = self._gradients[0][item.name].float()
            for other in self._gradients[1:]:
                gradient = gradient + other[item.name]
            gradient /= len(self._gradients)
            if item.kind in ("matrix", "expert"):
                self._muon(item, gradient, self._options.matrix_rate * factor)
            else:
                self._adam(item, gradient, self._options.other_rate * factor, step)
            self.publish(item, step + 1)

    def publish_all(self, next_step: int) -> None:
        """Fill the weights of this worker's parameters from the masters, as step ``next_step`` needs them."""
        for item in self._parameters:
            self.publish(item, next_step)

    @torch.no_grad()
    def publish(self, item: Parameter, next_step: int) -> None:
        """Copy a master into the weight that step ``next_step`` computes with, through int4 when that is on."""
        master = self._masters[item.name]
        quantized = item.kind == "expert" and 0 <= self._options.qat_from_step <= next_step
        self._weights[item.name].copy_(fake_int4(master) if quantized else master)

    def _muon(self, item: Parameter, gradient: torch.Tensor, rate: float) -> None:
        master, moment = self._masters[item.name], self._moments[item.name]
        moment.mul_(MOMENTUM).add_(gradient)
        update = as_matrices(item, gradient.add_(moment, alpha=MOMENTUM), self._options.architecture)
        target = as_matrices(item, master, self._options.architecture)
        target.mul_(1 - rate * self._options.weight_decay)
        target.add_(orthogonalise(update), alpha=-rate)

    def _adam(self, item: Parameter, gradient: torch.Tensor, rate: float, step: int) -> None:
        master, moment, square = self._masters[item.name], self._moments[item.name], self._squares[item.name]
        moment.lerp_(gradient, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        scale = square.div(1 - BETAS[1] ** (step + 1)).sqrt_().add_(EPSILON)
        master.addcdiv_(moment, scale, value=-rate / (1 - BETAS[0] ** (step + 1)))
