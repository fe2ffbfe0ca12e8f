"""Cross-entropy over the vocabulary without ever holding all logits: loss and gradients chunk by chunk.

T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CHUNK_TOKENS = 512


def softmax_slope(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of negative log-likelihoods (float32 scalar) and its derivative by the logits, in the logits' dtype."""
    log_probs = torch.log_softmax(logits_TV.float(), -1)
    is_target = torch.arange(logits_TV.shape[1], device=logits_TV.device) == targets_T[:, None]
    slope = log_probs.exp() - is_target.float()
    return -log_probs.gather(1, targets_T[:, None]).sum(), slope.to(logits_TV.dtype)


SoftmaxSlope = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class FusedCrossEntropy(torch.autograd.Function):
    """Mean negative log-likelihood in nats. The weight's gradient is added into a float32 buffer at once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_T: torch.Tensor,
        gradient_VD: torch.Tensor,
        slope_of: SoftmaxSlope,
    ) -> torch.Tensor:
        """``hidden_TD`` and ``weight_VD`` bfloat16, ``targets_T`` int64, ``gradient_VD`` float32, added to."""
        count = hidden_TD.shape[0]
        grad_hidden_TD = torch.empty_like(hidden_TD)
        total = torch.zeros((), device=hidden_TD.device)
        for start in range(0, count, CHUNK_TOKENS):
            hidden = hidden_TD[start : start + CHUNK_TOKENS]
            part, slope_TV = slope_of(torch.mm(hidden, weight_VD.t()), targets_T[start : start + CHUNK_TOKENS])
            total += part
            torch.mm(slope_TV, weight_VD, out=grad_hidden_TD[start : start + CHUNK_TOKENS])
            gradient_VD.add_(torch.mm(slope_TV.t(), hidden), alpha=1.0 / count)
        ctx.save_for_backward(grad_hidden_TD)
        ctx.count = count
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        """The weight's gradient was taken in forward, so ``grad`` must be one: the loss enters the sum unscaled."""
        (grad_hidden_TD,) = ctx.saved_tensors
        return grad_hidden_TD * (1.0 / ctx.count), None, None, None, None


class Embedding(torch.autograd.Function):
    """Rows of the embedding as float32; the gradient is added into the float32 buffer the head shares."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, ids_T: torch.Tensor, weight_VD: torch.Tensor, gradient_VD: torch.Tensor
    ) -> torch.Tensor:
        """``anchor`` is any tensor that requires a gradient: it puts this node into the graph."""
        ctx.save_for_backward(ids_T)
        ctx.gradient_VD = gradient_VD
        return weight_VD.index_select(0, ids_T).float()

    @staticmethod
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[None, None, None, None]:
        (ids_T,) = ctx.saved_tensors
        ctx.gradient_VD.index_add_(0, ids_T, grad_TD)
        return None, None, None, None
