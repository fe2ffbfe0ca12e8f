"""Small learned predictors. Inference is plain numpy; sim/fit_networks.py fits them.

Legend: L MoE layers, E experts of a layer, K experts per token, F features, H hidden units, S sketch dimensions, T rows.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tidegate.experts.predictor import (
    ALL_COLUMNS,
    F32,
    HEAT,
    LAST,
    Array,
    Calibration,
    History,
    HistoryPredictor,
    Predictor,
    TokenRows,
)

LAYERS_BEFORE = 3
LSTM_TOKENS = 10


def sigmoid(x: F32) -> F32:
    """1 / (1 + exp(-x)), without overflow."""
    out: F32 = 0.5 * (1 + np.tanh(0.5 * x))
    return out


class LayerMlp(HistoryPredictor):
    """One hidden layer on: the experts of the three layers before that are ``lookahead`` or more away, the last token's
    experts, decayed counts, and the token's row of a table. For the next step, whose token is unknown, decayed counts."""

    remembers = (LAST, HEAT)
    arrays: ClassVar[tuple[str, ...]] = (
        "w1_LFH", "b1_LH", "w2_LHE", "b2_LE", "tokens", "table_NLE", "prior_LE", "lookahead",
    )  # fmt: skip

    def __init__(
        self, num_layers: int, num_experts: int, w1_LFH: Array, b1_LH: Array, w2_LHE: Array, b2_LE: Array, tokens: Array,
        table_NLE: Array, prior_LE: Array, lookahead: Array, calibration: Calibration | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_layers, num_experts, calibration)
        self.w1_LFH, self.b1_LH, self.w2_LHE, self.b2_LE = w1_LFH, b1_LH, w2_LHE, b2_LE
        self.tokens, self.table_NLE, self.prior_LE, self.lookahead = tokens, table_NLE, prior_LE, lookahead
        self._lookahead = int(lookahead)
        self._row_of = TokenRows(tokens)

    def score(self, history: History, layer: int, *, is_next_step: bool) -> F32:
        if is_next_step:
            return np.asarray(history.heat_LE[layer], np.float32)
        features_F = self.features(history, layer)
        hidden_H = np.maximum(features_F @ self.w1_LFH[layer] + self.b1_LH[layer], 0)
        return sigmoid(hidden_H @ self.w2_LHE[layer] + self.b2_LE[layer])

    def features(self, history: History, layer: int) -> F32:
        """float32 [(LAYERS_BEFORE + 3) * E]."""
        num_experts = self.num_experts
        out = np.zeros((LAYERS_BEFORE + 3, num_experts), np.float32)
        routed = self.latest_routed(layer)
        for back in range(LAYERS_BEFORE):
            source = layer - self._lookahead - back
            if 0 <= source <= routed:
                out[back] = history.last_LE[source]
        out[LAYERS_BEFORE] = history.last_LE[layer]
        out[LAYERS_BEFORE + 1] = history.heat_LE[layer]
        row = self._row_of(history.token)
        out[LAYERS_BEFORE + 2] = self.prior_LE[layer] if row is None else self.table_NLE[row, layer]
        return out.ravel()


class WindowMlp(HistoryPredictor):
    """One tiny network for every expert of every layer, on the statistics of a window of 64 tokens and running averages; it
    forecasts use within the next ``horizon`` tokens."""

    sees_layers, remembers = False, ALL_COLUMNS
    window = 64
    num_features = 4
    arrays: ClassVar = ("w1_FH", "b1_H", "w2_H", "b2", "horizon")

    def __init__(
        self, num_layers: int, num_experts: int, w1_FH: Array, b1_H: Array, w2_H: Array, b2: Array, horizon: Array,
        calibration: Calibration | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_layers, num_experts, calibration)
        self.w1_FH, self.b1_H, self.w2_H, self.b2, self.horizon = w1_FH, b1_H, w2_H, b2, horizon

    def score(self, history: History, layer: int, *, is_next_step: bool) -> F32:
        hidden_EH = np.maximum(self.features(history, layer) @ self.w1_FH + self.b1_H, 0)
        return sigmoid(hidden_EH @ self.w2_H + self.b2)

    def features(self, history: History, layer: int) -> F32:
        """float32 [E, num_features]."""
        seen = max(1, min(int(history.seen_L[layer]), self.window))
        columns = (history.last_LE, history.count_LE / seen, history.heat_LE, history.slow_LE)
        return np.stack([column[layer] for column in columns], axis=1)


class Lstm(HistoryPredictor):
    """A layer's own small LSTM over its experts of the last ten tokens."""

    sees_layers, window = False, LSTM_TOKENS
    arrays: ClassVar = ("wx_LEG", "wh_LHG", "b_LG", "wo_LHE", "bo_LE")

    def __init__(
        self, num_layers: int, num_experts: int, wx_LEG: Array, wh_LHG: Array, b_LG: Array, wo_LHE: Array, bo_LE: Array,
        calibration: Calibration | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_layers, num_experts, calibration)
        self.wx_LEG, self.wh_LHG, self.b_LG, self.wo_LHE, self.bo_LE = wx_LEG, wh_LHG, b_LG, wo_LHE, bo_LE

    def score(self, history: History, layer: int, *, is_next_step: bool) -> F32:
        wx_EG, wh_HG, b_G = self.wx_LEG[layer], self.wh_LHG[layer], self.b_LG[layer]
        num_hidden = len(wh_HG)
        hidden_H = cell_H = np.zeros(num_hidden, np.float32)
        for experts_K in history.recent(layer, LSTM_TOKENS):
            gates_G = wx_EG[experts_K].sum(axis=0) + hidden_H @ wh_HG + b_G
            let_in, forget, let_out = sigmoid(gates_G[: 3 * num_hidden]).reshape(3, num_hidden)
            cell_H = forget * cell_H + let_in * np.tanh(gates_G[3 * num_hidden :])
            hidden_H = let_out * np.tanh(cell_H)
        return sigmoid(hidden_H @ self.wo_LHE[layer] + self.bo_LE[layer])


class NextGate(Predictor):
    """A linear map from the hidden state at an earlier router to this layer's choice: the layer's own gate, corrected by
    ridge regression (``sim.fit_networks.fit_next_gate``). ``matrix_LES`` works on sketches; row l of it belongs to the hidden
    state ``lookahead`` layers before l."""

    arrays: ClassVar = ("matrix_LES", "bias_LE", "lookahead", "num_experts_per_tok")

    def __init__(
        self, num_layers: int, num_experts: int, matrix_LES: Array, bias_LE: Array, lookahead: Array,
        num_experts_per_tok: Array, calibration: Calibration | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_layers, num_experts)
        self.matrix_LES, self.bias_LE, self.lookahead = matrix_LES, bias_LE, lookahead
        self.num_experts_per_tok, self.calibration = num_experts_per_tok, calibration
        self._ahead, self._top = int(lookahead), int(num_experts_per_tok)
        self._sketches: dict[int, F32] = {}

    @property
    def sketch_dims(self) -> int:
        return int(self.matrix_LES.shape[2])

    def begin_step(self, sequence_T: object, token_T: object) -> None:
        self._sketches = {}

    def observe(self, layer: int, topk_expert_ids_TK: Array) -> None:
        pass

    def observe_sketch(self, layer: int, sketch_TS: Array) -> None:
        self._sketches[layer] = sketch_TS.astype(np.float32)

    def predict(self, layer: int) -> F32:
        sketch_TS = self._sketches.get(layer - self._ahead)
        if sketch_TS is None:
            return np.zeros(self.num_experts, np.float32)
        logits_TE = sketch_TS @ self.matrix_LES[layer].T + self.bias_LE[layer]
        edge_T1 = np.partition(logits_TE, -self._top, axis=1)[:, -self._top, None]
        score_TE = sigmoid(4 * (logits_TE - edge_T1))
        if self.calibration is not None:
            score_TE = self.calibration(score_TE)
        out: F32 = 1 - np.prod(1 - score_TE, axis=0)
        return out
