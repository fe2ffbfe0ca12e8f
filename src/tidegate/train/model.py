"""The forward pass of a Qwen3-MoE model for training, with gradients of the big matrices written in place.

T tokens (all sequences of the step, one after the other), D hidden, B sequences, L positions, H heads, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from tidegate.train.loss import CHUNK_TOKENS, Embedding, FusedCrossEntropy, SoftmaxSlope, softmax_slope
from tidegate.train.moe import ExpertKernels, Experts, Router, activate, activate_backward
from tidegate.train.options import Architecture, RouterInput
from tidegate.train.weights import Buffers, Parameter


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding; the two halves of the head dimension are pairs."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotary_tables(architecture: Architecture, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [L, head_dim] float32."""
    exponent = torch.arange(0, architecture.head_dim, 2).float() / architecture.head_dim
    angles = torch.arange(num_positions).float()[:, None] / architecture.rope_theta**exponent
    both = torch.cat([angles, angles], -1)
    return both.cos(), both.sin()


def attention_block(
    x_TD: torch.Tensor,
    norm: torch.Tensor,
    qkv: torch.Tensor,
    query_norm: torch.Tensor,
    key_norm: torch.Tensor,
    output: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask_LL: torch.Tensor,
    shape: Architecture,
) -> torch.Tensor:
    """x + attention(norm(x)); float32 in and out, bfloat16 products. ``mask_LL`` is 0 or -inf, added to scores."""
    L, heads, groups, size = cos.shape[0], shape.num_heads, shape.num_kv_heads, shape.head_dim
    B, half = x_TD.shape[0] // L, qkv.dtype
    fused = functional.linear(rms_norm(x_TD, norm, shape.norm_eps).to(half), qkv).view(B, L, -1, size).float()
    query, key, value = fused.split([heads, groups, groups], 2)
    query = rotate(rms_norm(query, query_norm, shape.norm_eps), cos[:, None], sin[:, None]) * size**-0.5
    key = rotate(rms_norm(key, key_norm, shape.norm_eps), cos[:, None], sin[:, None])
    repeat = heads // groups
    q = query.permute(0, 2, 1, 3).to(half).reshape(B * groups, repeat * L, size)
    k = key.permute(0, 2, 1, 3).to(half).reshape(B * groups, L, size)
    v = value.permute(0, 2, 1, 3).to(half).reshape(B * groups, L, size)
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, groups, repeat, L, L).float() + mask_LL
    probs = torch.softmax(scores, -1).to(half).view(B * groups, repeat * L, L)
    mixed = torch.bmm(probs, v).view(B, heads, L, size).permute(0, 2, 1, 3).reshape(B * L, heads * size)
    return x_TD + functional.linear(mixed, output).float()


def moe_entry(
    x_TD: torch.Tensor, norm: torch.Tensor, router: torch.Tensor, eps: float, router_input: RouterInput
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normed hidden state in bfloat16 and the router's logits in float32, of the input that the options ask for."""
    hidden = rms_norm(x_TD, norm, eps)
    read = hidden
    if router_input != "plain":
        read = read - read.mean(-1, keepdim=True)
    if router_input == "standard":
        read = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + eps)
    return hidden.to(torch.bfloat16), functional.linear(read, router)


@dataclass
class Kernels:
    """The parts of the forward pass that are plain functions of tensors, so that they can be compiled."""

    attention: Callable[..., torch.Tensor] = attention_block
    entry: Callable[..., tuple[torch.Tensor, torch.Tensor]] = moe_entry
    experts: ExpertKernels = field(default_factory=ExpertKernels)
    softmax_slope: SoftmaxSlope = softmax_slope

    @staticmethod
    def build(compiled: bool) -> Kernels:
        if not compiled:
            return Kernels()

        def fuse(function: Callable[..., object]) -> Callable[..., object]:
            return torch.compile(function, dynamic=False, fullgraph=True)

        fused = ExpertKernels(fuse(activate), fuse(activate_backward))  # type: ignore[arg-type]
        return Kernels(fuse(attention_block), fuse(moe_entry), fused, fuse(softmax_slope))  # type: ignore[arg-type]


@dataclass(frozen=True)
class StepResult:
    """``loss`` is what backward runs on; ``nll`` is the mean cross-entropy alone (nats); ``load_LE`` per layer."""

    loss: torch.Tensor
    nll: torch.Tensor
    load_LE: torch.Tensor


class Model:
    """Holds bfloat16 weights and gradient buffers by name; :meth:`loss` builds the graph of one step."""

    def __init__(
        self,
        architecture: Architecture,
        routers: list[Router],
        parameters: list[Parameter],
        weights: Buffers,
        gradients: Buffers,
        sequence_length: int,
        compiled: bool = False,
    ) -> None:
        self.architecture, self.kernels = architecture, Kernels.build(compiled)
        self.weights, self.gradients = weights.views(), gradients.views()
        self._gradient_buffers = gradients
        self.routers = routers
        device = str(weights.full.device)
        for router in self.routers:
            router.to(device)
        self._cos, self._sin = (table.to(device) for table in rotary_tables(architecture, sequence_length))
        ones = torch.ones(sequence_length, sequence_length, dtype=torch.bool)
        self._mask_LL = torch.zeros(ones.shape).masked_fill_(ones.triu(1), float("-inf")).to(device)
        for item in parameters:
            if item.kind in ("matrix", "router", "norm"):
                self.weights[item.name].requires_grad_()
                self.weights[item.name].grad = self.gradients[item.name]

    def clear_gradients(self) -> None:
        self._gradient_buffers.half.zero_()
        self._gradient_buffers.full.zero_()

    def loss(self, ids_BL: torch.Tensor, targets_BL: torch.Tensor, temperature: float = 1.0) -> StepResult:
        """Build the graph. Gradients are complete after ``result.loss.backward()`` on cleared buffers."""
        hidden_TD, extra, load_LE = self._hidden(ids_BL, temperature, self.kernels)
        nll = FusedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden_TD, self.weights["embedding"], targets_BL.reshape(-1), self.gradients["embedding"],
            self.kernels.softmax_slope,
        )  # fmt: skip
        return StepResult(nll + extra, nll.detach(), load_LE)

    @torch.no_grad()
    def evaluate(
        self, ids_BL: torch.Tensor, targets_BL: torch.Tensor, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Negative log-likelihood of every target, [T] float32 in nats, and the load of experts per layer [layers, E]."""
        hidden_TD, _, load_LE = self._hidden(ids_BL, temperature, Kernels())
        parts = []
        for hidden, target in zip(
            hidden_TD.split(CHUNK_TOKENS), targets_BL.reshape(-1).split(CHUNK_TOKENS), strict=True
        ):
            logits = torch.mm(hidden, self.weights["embedding"].t()).float()
            parts.append(functional.cross_entropy(logits, target, reduction="none"))
        return torch.cat(parts), load_LE

    def _hidden(
        self, ids_BL: torch.Tensor, temperature: float, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Final normed hidden state [T, D] bfloat16, the router losses' sum, and loads [layers, E]."""
        weights, gradients, shape = self.weights, self.gradients, self.architecture
        x_TD = Embedding.apply(  # type: ignore[no-untyped-call]
            weights["final_norm"], ids_BL.reshape(-1), weights["embedding"], gradients["embedding"]
        )
        extra, loads = torch.zeros((), device=x_TD.device), []
        for layer, router in enumerate(self.routers):
            at = f"layers.{layer}."
            x_TD = kernels.attention(
                x_TD, weights[at + "attention_norm"], weights[at + "qkv"], weights[at + "query_norm"],
                weights[at + "key_norm"], weights[at + "output"], self._cos, self._sin, self._mask_LL, shape,
            )  # fmt: skip
            hidden_TD, logits_TE = kernels.entry(
                x_TD, weights[at + "moe_norm"], weights[at + "router"], shape.norm_eps, router.options.input
            )
            routing = router.route(logits_TE, temperature)
            big = (at + "gate_up", at + "down")
            tensors = tuple(weights[name] for name in big) + tuple(gradients[name] for name in big)
            x_TD = x_TD + Experts.apply(hidden_TD, routing.weights_TK, routing.expert_ids_TK, tensors, kernels.experts)  # type: ignore[no-untyped-call]
            extra = extra + routing.loss
            loads.append(routing.load_E)
        return rms_norm(x_TD, weights["final_norm"], shape.norm_eps).to(torch.bfloat16), extra, torch.stack(loads)
