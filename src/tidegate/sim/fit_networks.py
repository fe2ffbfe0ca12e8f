"""Fits the small networks with numpy: all layers side by side in one batched product, Adam, binary cross-entropy.

Legend: T rows, B rows of a batch, L MoE layers, E experts, F features, H hidden units, G = 4H gates, S sketch dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from tidegate.experts.predictor import FADE, SLOW_FADE
from tidegate.experts.predictor_networks import LAYERS_BEFORE, LSTM_TOKENS, LayerMlp, Lstm, NextGate, WindowMlp, sigmoid
from tidegate.sim.rows import Array, Rows, decayed_before, last_before, window_before
from tidegate.sim.token_table import count_tokens

_BATCH, _RATE, _DECAY = 128, 2e-3, (0.9, 0.99)
Step = Callable[[Array, dict[str, Array]], dict[str, Array]]


def _adam(
    weights: dict[str, Array], num_rows: int, epochs: float, seed: int, gradients: Step, batch: int = _BATCH
) -> None:
    """Changes the weights in place. The rate falls linearly to a tenth."""
    rng = np.random.default_rng(seed)
    first = {name: np.zeros_like(value) for name, value in weights.items()}
    second = {name: np.zeros_like(value) for name, value in weights.items()}
    num_steps = max(1, int(epochs * num_rows / batch))
    for step in range(1, num_steps + 1):
        rate = _RATE * (1 - 0.9 * step / num_steps)
        grads = gradients(rng.integers(0, num_rows, batch), weights)
        for name, grad in grads.items():
            first[name] += (1 - _DECAY[0]) * (grad - first[name])
            second[name] += (1 - _DECAY[1]) * (grad * grad - second[name])
            scale = np.sqrt(second[name] / (1 - _DECAY[1] ** step)) + 1e-8
            weights[name] -= (rate / (1 - _DECAY[0] ** step) * first[name] / scale).astype(np.float32)


def _random(rng: np.random.Generator, *shape: int) -> Array:
    values: Array = rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[-2] ** 0.5)
    return values


def fit_layer_mlp(rows: Rows, lookahead: int, seed: int, **size: Any) -> LayerMlp:
    """``size`` is that of ``train_layers``."""
    return LayerMlp(rows.num_layers, rows.num_experts, **train_layers(rows, lookahead, seed, **size))


def train_layers(
    rows: Rows, lookahead: int, seed: int, more: Callable[[Array], Array] | None = None, *, num_hidden: int = 64,
    most_tokens: int = 24_000, epochs: float = 3.0,
) -> dict[str, Any]:  # fmt: skip
    """The arrays of a ``LayerMlp``. Features as in its ``features``, behind them ``more``, [B, L, E] of the rows whose numbers it
    is given; a row's own use is taken out of its token's table entry."""
    table = count_tokens(rows)
    short = _head(rows, most_tokens)
    hot_TLE, is_first_T = short.hot(), short.is_first
    last_TLE = last_before(hot_TLE, is_first_T)
    heat_TLE = decayed_before(hot_TLE, is_first_T, float(FADE))
    num_layers, num_experts = rows.num_layers, rows.num_experts
    rng = np.random.default_rng(seed)
    blocks = LAYERS_BEFORE + (3 if more is None else 4)
    weights = {
        "w1": _random(rng, num_layers, blocks * num_experts, num_hidden),
        "b1": np.zeros((num_layers, num_hidden), np.float32),
        "w2": _random(rng, num_layers, num_hidden, num_experts),
        "b2": np.full((num_layers, num_experts), -2.0, np.float32),
    }

    def features(index_B: Array) -> Array:
        hot_BLE = hot_TLE[index_B]
        parts = np.zeros((len(index_B), num_layers, blocks, num_experts), np.float32)
        for back in range(LAYERS_BEFORE):
            gap = lookahead + back
            if gap < num_layers:
                parts[:, gap:, back] = hot_BLE[:, : num_layers - gap]
        parts[:, :, LAYERS_BEFORE] = last_TLE[index_B]
        parts[:, :, LAYERS_BEFORE + 1] = heat_TLE[index_B]
        parts[:, :, LAYERS_BEFORE + 2] = table.without_itself(short.token_T[index_B], hot_BLE)
        if more is not None:
            parts[:, :, LAYERS_BEFORE + 3] = more(index_B)
        return parts.reshape(len(index_B), num_layers, -1).swapaxes(0, 1)

    def gradients(index_B: Array, w: dict[str, Array]) -> dict[str, Array]:
        x_LBF, truth_LBE = features(index_B), hot_TLE[index_B].swapaxes(0, 1)
        hidden_LBH = np.maximum(x_LBF @ w["w1"] + w["b1"][:, None], 0)
        error_LBE = (sigmoid(hidden_LBH @ w["w2"] + w["b2"][:, None]) - truth_LBE) / len(index_B)
        back_LBH = (error_LBE @ w["w2"].swapaxes(1, 2)) * (hidden_LBH > 0)
        return {
            "w1": x_LBF.swapaxes(1, 2) @ back_LBH, "b1": back_LBH.sum(axis=1),
            "w2": hidden_LBH.swapaxes(1, 2) @ error_LBE, "b2": error_LBE.sum(axis=1),
        }  # fmt: skip

    _adam(weights, len(hot_TLE), epochs, seed, gradients)
    return {
        "w1_LFH": weights["w1"], "b1_LH": weights["b1"], "w2_LHE": weights["w2"], "b2_LE": weights["b2"],
        "tokens": table.tokens, "table_NLE": table.table(), "prior_LE": table.prior_LE, "lookahead": np.array(lookahead),
    }  # fmt: skip


def fit_window_mlp(
    rows: Rows, horizon: int, seed: int, *, num_hidden: int = 16, most_tokens: int = 6_000, epochs: float = 1.0
) -> WindowMlp:
    """The truth of a row is use in any of the ``horizon`` tokens from it on, same sequence."""
    short = _head(rows, most_tokens)
    hot_TLE, is_first_T = short.hot(), short.is_first
    stats = [
        last_before(hot_TLE, is_first_T), window_before(hot_TLE, is_first_T, WindowMlp.window),
        decayed_before(hot_TLE, is_first_T, float(FADE)), decayed_before(hot_TLE, is_first_T, float(SLOW_FADE)),
    ]  # fmt: skip
    truth_TLE = _used_within(hot_TLE, short.offsets, horizon)
    rng = np.random.default_rng(seed)
    weights = {
        "w1": _random(rng, WindowMlp.num_features, num_hidden),
        "b1": np.zeros(num_hidden, np.float32),
        "w2": _random(rng, num_hidden, 1)[:, 0],
        "b2": np.array(-2.0, np.float32),
    }

    def gradients(index_B: Array, w: dict[str, Array]) -> dict[str, Array]:
        x_NF = np.stack([stat[index_B].ravel() for stat in stats], axis=1).astype(np.float32)
        hidden_NH = np.maximum(x_NF @ w["w1"] + w["b1"], 0)
        error_N = (sigmoid(hidden_NH @ w["w2"] + w["b2"]) - truth_TLE[index_B].ravel()) / len(x_NF)
        back_NH = np.outer(error_N, w["w2"]) * (hidden_NH > 0)
        return {
            "w1": x_NF.T @ back_NH, "b1": back_NH.sum(axis=0), "w2": hidden_NH.T @ error_N, "b2": error_N.sum(),
        }  # fmt: skip

    _adam(weights, len(hot_TLE), epochs, seed, gradients, batch=16)
    arrays = (weights["w1"], weights["b1"], weights["w2"], weights["b2"], np.array(horizon))
    return WindowMlp(rows.num_layers, rows.num_experts, *arrays)


def fit_lstm(rows: Rows, seed: int, *, num_hidden: int = 16, most_tokens: int = 24_000, epochs: float = 3.0) -> Lstm:
    """12 KB a layer at 32 experts; back-propagation through the ten tokens."""
    short = _head(rows, most_tokens)
    hot_TLE, is_first_T = short.hot(), short.is_first
    begin_T = np.maximum.accumulate(np.where(is_first_T, np.arange(len(is_first_T)), 0))
    num_layers, num_experts = rows.num_layers, rows.num_experts
    rng = np.random.default_rng(seed)
    weights = {
        "wx": _random(rng, num_layers, num_experts, 4 * num_hidden),
        "wh": _random(rng, num_layers, num_hidden, 4 * num_hidden),
        "b": np.zeros((num_layers, 4 * num_hidden), np.float32),
        "wo": _random(rng, num_layers, num_hidden, num_experts),
        "bo": np.full((num_layers, num_experts), -2.0, np.float32),
    }
    weights["b"][:, num_hidden : 2 * num_hidden] = 1.0

    def gradients(index_B: Array, w: dict[str, Array]) -> dict[str, Array]:
        past = [index_B - back for back in range(LSTM_TOKENS, 0, -1)]
        inside = [(at >= begin_T[index_B])[None, :, None] for at in past]
        inputs = [np.where(ok, hot_TLE[np.maximum(at, 0)].swapaxes(0, 1), 0).astype(np.float32)
                  for at, ok in zip(past, inside, strict=True)]  # fmt: skip
        return _lstm_gradients(inputs, inside, hot_TLE[index_B].swapaxes(0, 1), w)

    _adam(weights, len(hot_TLE), epochs, seed, gradients)
    wx, wh, b, wo, bo = weights.values()
    return Lstm(num_layers, num_experts, wx, wh, b, wo, bo)


def _lstm_gradients(
    inputs: list[Array], inside: list[Array], truth_LBE: Array, w: dict[str, Array]
) -> dict[str, Array]:
    """Forward over the tokens, then back. Where a row's sequence has not begun (``inside`` is False) its state stays 0."""
    size = w["wh"].shape[1]
    hidden = cell = np.zeros((len(w["wh"]), truth_LBE.shape[1], size), np.float32)
    tape = []
    for x, ok in zip(inputs, inside, strict=True):
        gates = x @ w["wx"] + hidden @ w["wh"] + w["b"][:, None]
        i, f, o = (sigmoid(gates[..., n * size : (n + 1) * size]) for n in range(3))
        g = np.tanh(gates[..., 3 * size :])
        before, cell = cell, np.where(ok, f * cell + i * g, 0)
        squashed = np.tanh(cell)
        tape.append((x, hidden, before, i, f, o, g, squashed, ok))
        hidden = np.where(ok, o * squashed, 0)
    error = (sigmoid(hidden @ w["wo"] + w["bo"][:, None]) - truth_LBE) / truth_LBE.shape[1]
    grads = {name: np.zeros_like(value) for name, value in w.items()}
    grads["wo"], grads["bo"] = hidden.swapaxes(1, 2) @ error, error.sum(axis=1)
    d_hidden, d_cell = error @ w["wo"].swapaxes(1, 2), np.zeros_like(hidden)
    for x, hidden_before, cell_before, i, f, o, g, squashed, ok in reversed(tape):
        d_hidden, d_cell = d_hidden * ok, d_cell * ok
        d_cell = d_cell + d_hidden * o * (1 - squashed * squashed)
        d_gates = np.concatenate(
            [d_cell * g * i * (1 - i), d_cell * cell_before * f * (1 - f), d_hidden * squashed * o * (1 - o),
             d_cell * i * (1 - g * g)], axis=2,
        )  # fmt: skip
        grads["wx"] += x.swapaxes(1, 2) @ d_gates
        grads["wh"] += hidden_before.swapaxes(1, 2) @ d_gates
        grads["b"] += d_gates.sum(axis=1)
        d_hidden, d_cell = d_gates @ w["wh"].swapaxes(1, 2), d_cell * f
    return grads


def fit_next_gate(
    sketch_TLS: Array, hot_TLE: Array, lookahead: int, ridge: float = 1.0, gates_LES: Array | None = None
) -> NextGate:
    """Ridge regression from what the router ``lookahead`` layers before saw to this layer's choice. With ``gates_LES``, the
    layer's own gate on the same space, only the correction to it is shrunk. Layers without a source predict nothing."""
    num_layers, num_experts = hot_TLE.shape[1:]
    dims = sketch_TLS.shape[2]
    matrix = np.zeros((num_layers, num_experts, dims), np.float32)
    bias = np.full((num_layers, num_experts), -1.0, np.float32)
    for layer in range(lookahead, num_layers):
        x_TS = sketch_TLS[:, layer - lookahead].astype(np.float64)
        start_ES = np.zeros((num_experts, dims)) if gates_LES is None else gates_LES[layer].astype(np.float64)
        mean_S, rest_TE = x_TS.mean(axis=0), hot_TLE[:, layer] - x_TS @ start_ES.T
        centred_TS, mean_E = x_TS - mean_S, rest_TE.mean(axis=0)
        normal_SS = centred_TS.T @ centred_TS + ridge * len(x_TS) / dims * np.eye(dims)
        correction_SE = np.linalg.solve(normal_SS, centred_TS.T @ (rest_TE - mean_E))
        matrix[layer] = start_ES + correction_SE.T
        bias[layer] = mean_E - mean_S @ correction_SE
    top = int(hot_TLE[0, 0].sum())
    return NextGate(num_layers, num_experts, matrix, bias, np.array(lookahead), np.array(top))


def _used_within(hot_TLE: Array, offsets: Array, horizon: int) -> Array:
    out = hot_TLE.copy()
    for start, stop in pairwise(offsets.tolist()):
        for ahead in range(1, min(horizon, stop - start)):
            out[start : stop - ahead] |= hot_TLE[start + ahead : stop]
    return out


def _head(rows: Rows, most_tokens: int) -> Rows:
    """Whole sequences from the start with about this many rows, at least one."""
    cut = max(1, int(np.searchsorted(rows.offsets, most_tokens, side="right")) - 1)
    return rows.part(0, cut)
