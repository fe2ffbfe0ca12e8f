"""Muon for the matrices, AdamW for embedding, routers and norms; each worker updates its own share of the parameters.

Muon (Jordan et al. 2024): the momentum of a matrix is replaced by the nearest semi-orthogonal matrix, found by five
Newton-Schulz steps. Experts are treated one by one, with gate and up apart, in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tidegate.train.options import Architecture, TrainOptions
from tidegate.train.quantization import fake_int4
from tidegate.train.weights import Parameter

MOMENTUM = 0.95
BETAS = (0.9, 0.95)
EPSILON = 1e-8
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_MATRICES_IN_CACHE = 16  # this many at a time stay in a core's cache for all five steps


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Singular values of each [N, K] matrix of a batch pushed to about one, in bfloat16. Wants N <= K."""
    return torch.cat([_newton_schulz(part) for part in matrices.split(_MATRICES_IN_CACHE)])


def _newton_schulz(matrices: torch.Tensor) -> torch.Tensor:
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


def advance_moment(moment: torch.Tensor, *gradients: torch.Tensor) -> torch.Tensor:
    """Mean of the workers' gradients into the momentum, in place; returns Nesterov's update in bfloat16."""
    gradient = gradients[0].float()
    for other in gradients[1:]:
        gradient = gradient + other.float()
    gradient = gradient / len(gradients)
    moment.mul_(MOMENTUM).add_(gradient)
    return (gradient + MOMENTUM * moment).bfloat16()


def apply_update(
    master: torch.Tensor, weight: torch.Tensor, update: torch.Tensor, rate: torch.Tensor, decay: float, quantized: bool
) -> None:
    """Weight decay and update of a master, and the weight to compute with, through int4 if ``quantized``; in place.
    ``rate`` is a scalar tensor, so that a compiled version serves every step."""
    master.copy_(master * (1 - rate * decay) - rate * update.float())
    weight.copy_(fake_int4(master) if quantized else master)


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

        fuse = partial(torch.compile, dynamic=False, fullgraph=True) if options.compile else lambda function: function
        self._advance_moment, self._apply_update = fuse(advance_moment), fuse(apply_update)

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Apply optimizer step number ``step`` (from 0): masters, moments and weights change in place."""
        factor = self._options.rate_factor(step)
        for item in self._parameters:
            if item.kind in ("matrix", "expert"):
                self._muon(item, self._options.matrix_rate * factor, step)
            else:
                self._adam(item, self._options.other_rate * factor, step)
                self.publish(item, step + 1)

    def publish_all(self, next_step: int) -> None:
        """Fill the weights of this worker's parameters from the masters, as step ``next_step`` needs them."""
        for item in self._parameters:
            self.publish(item, next_step)

    @torch.no_grad()
    def publish(self, item: Parameter, next_step: int) -> None:
        """Copy a master into the weight that step ``next_step`` computes with, through int4 when that is on."""
        master = self._masters[item.name]
        self._weights[item.name].copy_(fake_int4(master) if self._quantized(item, next_step) else master)

    def _quantized(self, item: Parameter, step: int) -> bool:
        return item.kind == "expert" and 0 <= self._options.qat_from_step <= step

    def _muon(self, item: Parameter, rate: float, step: int) -> None:
        master, weight = self._masters[item.name], self._weights[item.name]
        gradients = [named[item.name] for named in self._gradients]
        nesterov = self._advance_moment(self._moments[item.name], *gradients)
        direction = orthogonalise(as_matrices(item, nesterov, self._options.architecture))
        transposed = master.shape[-2] > master.shape[-1] and not item.name.endswith(("qkv", "gate_up"))
        update = (direction.transpose(-1, -2) if transposed else direction).reshape(master.shape)
        scalar = torch.tensor(rate, device=master.device)
        self._apply_update(master, weight, update, scalar, self._options.weight_decay, self._quantized(item, step + 1))

    def _adam(self, item: Parameter, rate: float, step: int) -> None:
        gradient = torch.stack([named[item.name] for named in self._gradients]).mean(0)
        master, moment, square = self._masters[item.name], self._moments[item.name], self._squares[item.name]
        moment.lerp_(gradient, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        scale = square.div(1 - BETAS[1] ** (step + 1)).sqrt_().add_(EPSILON)
        master.addcdiv_(moment, scale, value=-rate / (1 - BETAS[0] ** (step + 1)))
