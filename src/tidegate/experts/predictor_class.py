"""A class of text as one more thing to know: the nearest of a few centroids of embeddings, by the last tokens.

Legend: L MoE layers, E experts of a layer, C classes, V vocabulary, S dimensions of a token's vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from tidegate.experts.predictor import F32, Array, Calibration, History
from tidegate.experts.predictor_networks import LayerMlp


class SemanticMlp(LayerMlp):
    """``LayerMlp`` that also sees how often the class of the text uses each expert. The mean vector of the last CLASS_TOKENS
    tokens (``History.tokens``) belongs to the nearest centroid."""

    arrays: ClassVar[tuple[str, ...]] = (*LayerMlp.arrays, "vector_VS", "centroid_CS", "class_CLE")

    def __init__(
        self, num_layers: int, num_experts: int, *, vector_VS: Array, centroid_CS: Array, class_CLE: Array,
        calibration: Calibration | None = None, **mlp: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_layers, num_experts, calibration=calibration, **mlp)
        self.vector_VS, self.centroid_CS, self.class_CLE = vector_VS, np.asarray(centroid_CS, np.float32), class_CLE
        self._half_C = 0.5 * (self.centroid_CS**2).sum(axis=1)
        self._class_of: dict[History, int] = {}

    def begin_step(self, sequence_T: Sequence[int], token_T: Sequence[int]) -> None:
        super().begin_step(sequence_T, token_T)
        self._class_of = {history: self.class_of(history.tokens) for history in dict.fromkeys(self._rows)}

    def class_of(self, tokens: Iterable[int]) -> int:
        """Of a text that ends with these tokens; those without a vector do not count."""
        known = [token for token in tokens if 0 <= token < len(self.vector_VS)]
        if not known:
            return 0
        mean_S = self.vector_VS[known].astype(np.float32).mean(axis=0)
        return int(np.argmax(self.centroid_CS @ mean_S - self._half_C))

    def features(self, history: History, layer: int) -> F32:
        """float32 [(LAYERS_BEFORE + 4) * E]."""
        row_E = self.class_CLE[self._class_of[history], layer].astype(np.float32)
        return np.concatenate([super().features(history, layer), row_E])
