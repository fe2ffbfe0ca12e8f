"""The MoE block for training: routing with its losses, and experts over tokens sorted by expert.

T tokens, D hidden, F expert width, E experts, K experts per token, R rows of the sorted buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tidegate.train.options import Architecture, RouterOptions

ROW_MULTIPLE = 32  # rows of an expert are padded to this, so that few matrix shapes occur and each is compiled once


@dataclass(frozen=True)
class Routing:
    """``expert_ids_TK`` int64, ``weights_TK`` float32 (rows sum to one), ``load_E`` share of assignments (sums to 1)."""

    expert_ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    load_E: torch.Tensor
    loss: torch.Tensor


class Router:
    """Chooses experts in one layer and keeps what must survive a step: the bias and the window of recent loads.

    Both are changed in place and belong into checkpoints (:meth:`state`).
    """

    def __init__(self, architecture: Architecture, options: RouterOptions) -> None:
        self.options, self.architecture = options, architecture
        E = architecture.num_experts
        self.bias_E = torch.zeros(E)
        self.window_WE = torch.zeros(options.window_tokens if options.balance_scope == "window" else 0, E)
        ages = torch.arange(self.window_WE.shape[0] - 1, -1, -1, dtype=torch.float32)
        self._age_weights_W = options.window_decay**ages

    def state(self) -> list[torch.Tensor]:
        """The tensors that change in place: bias [E] and window [W, E] (W is 0 where the option is off)."""
        return [self.bias_E, self.window_WE]

    def to(self, device: str) -> None:
        self.bias_E, self.window_WE = self.bias_E.to(device), self.window_WE.to(device)
        self._age_weights_W = self._age_weights_W.to(device)

    def route(self, logits_TE: torch.Tensor, temperature: float) -> Routing:
        """Top-k of softmax(logits / temperature), renormalised; plus the balance and z losses (already weighted)."""
        options, E, K = self.options, self.architecture.num_experts, self.architecture.num_experts_per_tok
        probs_TE = torch.softmax(logits_TE / temperature, -1)
        scores_TE = probs_TE.detach() + self.bias_E if options.bias_rate else probs_TE.detach()
        if options.capacity_factor:
            capacity = options.capacity(len(probs_TE), self.architecture)
            expert_ids_TK = assign_with_capacity(scores_TE, K, capacity)
        else:
            expert_ids_TK = scores_TE.topk(K, -1).indices
        chosen_TK = probs_TE.gather(1, expert_ids_TK)
        weights_TK = chosen_TK / chosen_TK.sum(-1, keepdim=True)
        load_E = torch.bincount(expert_ids_TK.reshape(-1), minlength=E).float() / expert_ids_TK.numel()
        loss = torch.zeros((), device=logits_TE.device)
        if options.balance_alpha:
            windowed = options.balance_scope == "window" and torch.is_grad_enabled()
            used_E = self._window_load(expert_ids_TK) if windowed else load_E
            loss = loss + options.balance_alpha * E * (used_E * probs_TE.mean(0)).sum()
        if options.z_loss:
            loss = loss + options.z_loss * torch.logsumexp(logits_TE, -1).square().mean()
        return Routing(expert_ids_TK, weights_TK, load_E, loss)

    def update_bias(self, load_E: torch.Tensor) -> None:
        """Move the bias one step towards the experts below their fair share ``1/E`` (after an optimizer step)."""
        if self.options.bias_rate:
            self.bias_E += self.options.bias_rate * torch.sign(1.0 / len(load_E) - load_E)

    def _window_load(self, expert_ids_TK: torch.Tensor) -> torch.Tensor:
        """Slide the window over this step's tokens; their decayed share of assignments per expert (sums to 1)."""
        hits_TE = torch.zeros(len(expert_ids_TK), self.architecture.num_experts, device=expert_ids_TK.device)
        hits_TE.scatter_(1, expert_ids_TK, 1.0)
        self.window_WE.copy_(torch.cat([self.window_WE, hits_TE])[-len(self.window_WE) :])
        weighted_E = self._age_weights_W @ self.window_WE
        return weighted_E / weighted_E.sum().clamp_min(1e-9)


def assign_with_capacity(scores_TE: torch.Tensor, num_choices: int, capacity: int) -> torch.Tensor:
    """K distinct experts per token, none chosen more than ``capacity`` times; overflow goes to the next best.

    In round j every token asks for its best expert that is not yet its own and still has room; an expert with more
    askers than room keeps those with the highest score. Needs capacity * E >= T * K. Returns int64 [T, K].
    Tokens that find only experts they already hold (the last places of a tight capacity) take the emptiest others.
    """
    T, E = scores_TE.shape
    room_E = torch.full((E,), capacity, device=scores_TE.device)
    taken_TE = torch.zeros_like(scores_TE, dtype=torch.bool)
    chosen_TK = torch.empty(T, num_choices, dtype=torch.int64, device=scores_TE.device)
    for choice in range(num_choices):
        waiting = torch.arange(T, device=scores_TE.device)
        while len(waiting):
            allowed = ~taken_TE[waiting] & (room_E > 0)
            stuck = ~allowed.any(-1)
            allowed[stuck] = ~taken_TE[waiting[stuck]]
            value, expert = scores_TE[waiting].masked_fill(~allowed, -1.0).max(-1)
            order = torch.argsort(value + 2.0 * stuck, descending=True, stable=True)
            order = order[torch.argsort(expert[order], stable=True)]
            sorted_expert = expert[order]
            first = torch.searchsorted(sorted_expert, torch.arange(E, device=expert.device))
            place = torch.arange(len(order), device=expert.device) - first[sorted_expert]
            accepted = order[(place < room_E[sorted_expert]) | stuck[order]]
            chosen_TK[waiting[accepted], choice] = expert[accepted]
            taken_TE[waiting[accepted], expert[accepted]] = True
            room_E = (room_E - torch.bincount(expert[accepted], minlength=E)).clamp_min(0)
            keep = torch.ones(len(waiting), dtype=torch.bool, device=expert.device)
            keep[accepted] = False
            waiting = waiting[keep]
    return chosen_TK


def activate(fused_RN: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [R, 2F] rows (gate first), in float32 inside."""
    gate, up = fused_RN.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(fused_RN.dtype)


def activate_backward(
    fused_RN: torch.Tensor, slope_RF: torch.Tensor, weights_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the unweighted slope of the activation: slope of the fused rows, weighted activation, slope of weights."""
    gate, up = fused_RN.float().chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    slope = slope_RF.float()
    grad_weights_R = (slope * silu * up).sum(-1)
    weighted = weights_R[:, None]
    slope = slope * weighted
    grad_gate = slope * up * (sigmoid + silu * (1 - sigmoid))
    grad_fused = torch.cat([grad_gate, slope * silu], -1).to(fused_RN.dtype)
    return grad_fused, (silu * up * weighted).to(fused_RN.dtype), grad_weights_R


@dataclass
class ExpertKernels:
    """The two elementwise functions, plain or compiled."""

    activate: Callable[[torch.Tensor], torch.Tensor] = activate
    activate_backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = activate_backward


class Experts(torch.autograd.Function):
    """sum_k weight_k * down_e(activate(gate_up_e(x))) over each token's experts, without dropping any.

    Rows are sorted by expert into one buffer, each expert's part padded with zero rows to ROW_MULTIPLE. Gradients of
    the expert weights are *written* (not added) into the given bfloat16 buffers during backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        kernels: ExpertKernels,
    ) -> torch.Tensor:
        """``tensors``: gate_up_END, down_EDF and their gradient buffers. Returns [T, D] in the hidden's dtype."""
        gate_up_END, down_EDF, _, _ = tensors
        T, K = expert_ids_TK.shape
        position_TK, bounds = sorted_positions(expert_ids_TK, len(gate_up_END))
        num_rows = T * K + ROW_MULTIPLE * len(gate_up_END)
        source_R = torch.full((num_rows,), T, device=hidden_TD.device)
        source_R[position_TK] = torch.arange(T, device=hidden_TD.device)[:, None].expand(T, K)
        padded = torch.cat([hidden_TD, hidden_TD.new_zeros(1, hidden_TD.shape[1])])
        rows_RD = padded.index_select(0, source_R)
        fused_RN = rows_RD.new_empty(num_rows, gate_up_END.shape[1])
        for expert, (start, stop) in enumerate(bounds):
            torch.mm(rows_RD[start:stop], gate_up_END[expert].t(), out=fused_RN[start:stop])
        fused_RN[bounds[-1][1] :].zero_()
        active_RF = kernels.activate(fused_RN)
        out_RD = rows_RD.new_empty(num_rows, down_EDF.shape[1])
        for expert, (start, stop) in enumerate(bounds):
            torch.mm(active_RF[start:stop], down_EDF[expert].t(), out=out_RD[start:stop])
        result_TD = gather_sum(out_RD, position_TK, weights_TK)
        ctx.save_for_backward(rows_RD, fused_RN, weights_TK, position_TK, source_R)
        ctx.tensors, ctx.bounds, ctx.kernels = tensors, bounds, kernels
        return result_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        rows_RD, fused_RN, weights_TK, position_TK, source_R = ctx.saved_tensors
        gate_up_END, down_EDF, grad_gate_up_END, grad_down_EDF = ctx.tensors
        bounds, used = ctx.bounds, ctx.bounds[-1][1]
        padded = torch.cat([grad_TD, grad_TD.new_zeros(1, grad_TD.shape[1])])
        grad_RD = padded.index_select(0, source_R)
        weights_R = weights_TK.new_zeros(len(rows_RD))
        weights_R[position_TK] = weights_TK
        slope_RF = rows_RD.new_empty(len(rows_RD), down_EDF.shape[2])
        for expert, (start, stop) in enumerate(bounds):
            torch.mm(grad_RD[start:stop], down_EDF[expert], out=slope_RF[start:stop])
        slope_RF[used:].zero_()
        grad_fused_RN, weighted_RF, grad_weights_R = ctx.kernels.activate_backward(fused_RN, slope_RF, weights_R)
        grad_rows_RD = rows_RD.new_empty(rows_RD.shape)
        for expert, (start, stop) in enumerate(bounds):
            torch.mm(grad_RD[start:stop].t(), weighted_RF[start:stop], out=grad_down_EDF[expert])
            torch.mm(grad_fused_RN[start:stop].t(), rows_RD[start:stop], out=grad_gate_up_END[expert])
            torch.mm(grad_fused_RN[start:stop], gate_up_END[expert], out=grad_rows_RD[start:stop])
        grad_hidden_TD = gather_sum(grad_rows_RD, position_TK, torch.ones_like(weights_TK))
        return grad_hidden_TD, grad_weights_R[position_TK], None, None, None


def sorted_positions(expert_ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Row of every assignment in the buffer sorted by expert, and each expert's padded (start, stop) rows."""
    flat = expert_ids_TK.reshape(-1)
    counts = torch.bincount(flat, minlength=num_experts)
    padded = (counts + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE
    stops = padded.cumsum(0)
    shift_E = (stops - padded) - (counts.cumsum(0) - counts)
    order = torch.argsort(flat, stable=True)
    position = torch.empty_like(flat)
    position[order] = torch.arange(len(flat), device=flat.device) + shift_E[flat[order]]
    stop_list = stops.tolist()
    return position.view(expert_ids_TK.shape), list(zip([0, *stop_list[:-1]], stop_list, strict=True))


def gather_sum(rows_RD: torch.Tensor, position_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """[T, D]: weighted sum of each token's K rows."""
    return functional.embedding_bag(position_TK, rows_RD, mode="sum", per_sample_weights=weights_TK.to(rows_RD.dtype))
