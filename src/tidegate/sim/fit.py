"""Fitting predictors to a trace: counts here, small networks in fit_networks.py. numpy only; minutes at most.

Legend: T rows, L MoE layers, E experts of a layer, N tokens of a table, A layers ahead.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from tidegate.errors import UsageError
from tidegate.experts.predictor import Calibration, HistoryPredictor, Predictor
from tidegate.experts.predictor_counts import Groups, Markov, TokenTable
from tidegate.experts.predictor_file import PREDICTORS, UNFITTED
from tidegate.experts.predictor_networks import NextGate
from tidegate.sim.fit_networks import fit_layer_mlp, fit_lstm, fit_next_gate, fit_window_mlp
from tidegate.sim.groups import co_activation, grouped
from tidegate.sim.rows import Array, Rows
from tidegate.sim.semantic import fit_semantic_mlp
from tidegate.sim.token_table import count_tokens

_MARKOV_AHEAD, _MARKOV_PRIOR = 3, 8.0


def fit_predictor(
    kind: str,
    rows: Rows,
    *,
    lookahead: int = 1,
    horizon: int = 1,
    seed: int = 0,
    vector_VS: Array | None = None,
    **size: Any,
) -> Predictor:
    """A fitted and calibrated predictor. ``lookahead`` is for ``mlp``, ``horizon`` for ``window-mlp``, ``vector_VS``
    (``semantic.token_vectors``) for ``semantic``; ``size`` overrides the networks' training sizes. The last tenth of the
    sequences calibrates and is not fitted to. Raises UsageError for what a kind needs and does not get."""
    fitting, calibrating = rows.split(0.1) if len(rows.ids) > 1 else (rows, rows)
    shape = (rows.num_layers, rows.num_experts)
    if kind == "next-gate":
        return _fit_next_gate(fitting, calibrating, lookahead)
    predictor: HistoryPredictor
    if kind in UNFITTED:
        predictor = PREDICTORS[kind](*shape)
    elif kind == "token-table":
        table = count_tokens(fitting)
        predictor = TokenTable(*shape, table.tokens, table.table(), table.prior_LE)
    elif kind == "markov":
        predictor = _fit_markov(fitting)
    elif kind == "groups":
        size_of_group = 2 * rows.num_experts_per_tok
        predictor = Groups(*shape, grouped(co_activation(fitting), max(2, rows.num_experts // size_of_group)))
    elif kind == "mlp":
        predictor = fit_layer_mlp(fitting, lookahead, seed, **size)
    elif kind == "semantic":
        if vector_VS is None:
            raise UsageError("semantic needs the model's embedding: name the model with --embedding")
        predictor = fit_semantic_mlp(fitting, lookahead, seed, vector_VS, **size)
    elif kind == "window-mlp":
        predictor = fit_window_mlp(fitting, horizon, seed, **size)
    else:
        assert kind == "lstm", kind
        predictor = fit_lstm(fitting, seed, **size)
    predictor.calibration = calibrate(predictor, calibrating, lookahead)
    return predictor


def calibrate(predictor: HistoryPredictor, rows: Rows, lookahead: int, most_tokens: int = 400) -> Calibration:
    """From raw scores to frequencies, on the first ``most_tokens`` rows."""
    scores, used = [], []
    predictor.calibration = None
    every = max(1, rows.num_layers // 8)
    for start, stop in pairwise(rows.offsets.tolist()):
        sequence = -1 - start  # ids that no engine gives
        for t in range(start, min(stop, most_tokens)):
            predictor.begin_step([sequence], [int(rows.token_T[t])])
            for layer in range(rows.num_layers - lookahead):
                predictor.observe(layer, rows.experts_TLK[t : t + 1, layer])
                target = layer + lookahead
                if target % every == 0:
                    hot_E = np.zeros(rows.num_experts, np.uint8)
                    hot_E[rows.experts_TLK[t, target]] = 1
                    scores.append(np.array(predictor.predict(target)))
                    used.append(hot_E)
            for layer in range(max(0, rows.num_layers - lookahead), rows.num_layers):
                predictor.observe(layer, rows.experts_TLK[t : t + 1, layer])
        if stop >= most_tokens:
            break
    if not scores:
        return Calibration(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    return Calibration.fit(np.concatenate(scores), np.concatenate(used))


def _fit_next_gate(fitting: Rows, calibrating: Rows, lookahead: int, most_tokens: int = 8000) -> NextGate:
    """Raises UsageError for a trace without sketches."""
    if not fitting.sketch_TLS.shape[2]:
        raise UsageError("next-gate needs what the routers saw: record the trace with --sketch 128")
    predictor = fit_next_gate(fitting.sketch_TLS[:most_tokens], fitting.hot()[:most_tokens], lookahead)
    scores, used = [], []
    hot_TLE = calibrating.hot()
    for t in range(min(1000, len(hot_TLE))):
        predictor.begin_step([0], [0])
        for layer in range(calibrating.num_layers):
            if layer >= lookahead:
                scores.append(predictor.predict(layer))
                used.append(hot_TLE[t, layer])
            predictor.observe_sketch(layer, calibrating.sketch_TLS[t : t + 1, layer])
    if scores:
        predictor.calibration = Calibration.fit(np.concatenate(scores), np.concatenate(used))
    return predictor


def _fit_markov(rows: Rows) -> Markov:
    """table[a, l, i, j]: how often expert j of layer l follows expert i of layer l - a - 1, shrunk to the prior."""
    num_layers, num_experts = rows.num_layers, rows.num_experts
    table = np.zeros((_MARKOV_AHEAD, num_layers, num_experts, num_experts), np.float16)
    hot: list[Array] = [rows.hot(slice(layer, layer + 1))[:, 0].astype(np.float32) for layer in range(num_layers)]
    prior_LE = np.stack([layer.mean(axis=0) for layer in hot])
    for layer in range(num_layers):
        for ahead in range(1, min(_MARKOV_AHEAD, layer) + 1):
            before = hot[layer - ahead]
            pairs = before.T @ hot[layer] + _MARKOV_PRIOR * prior_LE[layer]
            table[ahead - 1, layer] = pairs / (before.sum(axis=0)[:, None] + _MARKOV_PRIOR)
    return Markov(num_layers, num_experts, table, prior_LE)
