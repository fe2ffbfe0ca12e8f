"""Classes of text from a model's embedding and a trace, and the predictor that knows them.

Legend: T rows, L MoE layers, E experts of a layer, C classes, V vocabulary, S dimensions of a token's vector, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tidegate.checkpoint.store import ExpertStore
from tidegate.experts.predictor import CLASS_TOKENS
from tidegate.experts.predictor_class import SemanticMlp
from tidegate.experts.trace import sketch_matrix
from tidegate.quant.pack import unpack
from tidegate.sim.fit_networks import train_layers
from tidegate.sim.rows import Array, Rows

NUM_CLASSES, VECTOR_DIMS = 16, 16
_ROUNDS, _MOST_SAMPLES, _PRIOR_USES, _BLOCK_ROWS, _SKETCH_DIMS = 25, 20_000, 8.0, 4096, 64


@dataclass(frozen=True)
class Classes:
    """``class_T`` of every row; centroids float32 [C, S]; how often a class uses each expert, float16 [C, L, E]."""

    class_T: Array
    centroid_CS: Array
    class_CLE: Array


def token_vectors(store: ExpertStore) -> Array:
    """float16 [V, S]: the model's embedding, centred, in the directions in which it varies most, each row of length 1."""
    entry, width = store.dense["embed"], store.config.hidden_size
    count, fmt = store.config.vocab_size, entry.fmt
    assert fmt is not None, "a matrix"
    packed = np.memmap(store.dense_path, np.uint8, "r", entry.offset, (entry.nbytes,))
    parts = []
    for start in range(0, count, _BLOCK_ROWS):  # a large vocabulary in float32 would not fit
        rows, first = min(_BLOCK_ROWS, count - start), fmt.packed_bytes(start, width)
        block = unpack(np.asarray(packed[first : first + fmt.packed_bytes(rows, width)]), fmt, rows, width)
        parts.append(block @ sketch_matrix(width, _SKETCH_DIMS) if width > _SKETCH_DIMS else block)
    vectors = np.concatenate(parts)
    vectors -= vectors.mean(axis=0)
    _, directions = np.linalg.eigh(vectors.T @ vectors)
    vectors = vectors @ directions[:, ::-1][:, :VECTOR_DIMS]
    out: Array = (vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)).astype(np.float16)
    return out


def find_classes(rows: Rows, vector_VS: Array, seed: int) -> Classes:
    """By k-means over the mean vectors of the last CLASS_TOKENS tokens."""
    mean_TS = _window_means(rows, vector_VS)
    rng = np.random.default_rng(seed)
    sample = mean_TS[rng.permutation(len(mean_TS))[:_MOST_SAMPLES]]
    centroid_CS = sample[rng.permutation(len(sample))[:NUM_CLASSES]].copy()
    for _ in range(_ROUNDS):
        nearest = _nearest(sample, centroid_CS)
        for number in np.unique(nearest):
            centroid_CS[number] = sample[nearest == number].mean(axis=0)
    class_T = _nearest(mean_TS, centroid_CS)
    uses = np.zeros((len(centroid_CS), rows.num_layers, rows.num_experts), np.float32)
    for layer in range(rows.num_layers):
        for column in range(rows.num_experts_per_tok):
            np.add.at(uses[:, layer], (class_T, rows.experts_TLK[:, layer, column]), 1)
    prior_LE = uses.sum(axis=0) / len(class_T)
    total_C = np.bincount(class_T, minlength=len(centroid_CS)) + _PRIOR_USES
    table = (uses + _PRIOR_USES * prior_LE) / total_C[:, None, None]
    return Classes(class_T, centroid_CS, table.astype(np.float16))


def fit_semantic_mlp(rows: Rows, lookahead: int, seed: int, vector_VS: Array, **size: Any) -> SemanticMlp:
    classes = find_classes(rows, vector_VS, seed)
    arrays = train_layers(rows, lookahead, seed, lambda index_B: classes.class_CLE[classes.class_T[index_B]], **size)
    return SemanticMlp(
        rows.num_layers, rows.num_experts, vector_VS=vector_VS, centroid_CS=classes.centroid_CS,
        class_CLE=classes.class_CLE, **arrays,
    )  # fmt: skip


def _window_means(rows: Rows, vector_VS: Array) -> Array:
    """float32 [T, S], as ``SemanticMlp.class_of`` takes them."""
    known_T = (rows.token_T >= 0) & (rows.token_T < len(vector_VS))
    vector_TS = np.where(known_T[:, None], vector_VS[np.where(known_T, rows.token_T, 0)].astype(np.float64), 0.0)
    totals = np.concatenate([np.zeros((1, vector_TS.shape[1])), np.cumsum(vector_TS, axis=0)])
    counts = np.concatenate([[0], np.cumsum(known_T)])
    after = np.arange(1, len(known_T) + 1)
    begin = np.maximum.accumulate(np.where(rows.is_first, after - 1, 0))
    low = np.maximum(begin, after - CLASS_TOKENS)
    means: Array = (totals[after] - totals[low]) / np.maximum(counts[after] - counts[low], 1)[:, None]
    return means.astype(np.float32)


def _nearest(points_TS: Array, centroid_CS: Array) -> Array:
    nearest: Array = np.argmax(points_TS @ centroid_CS.T - 0.5 * (centroid_CS**2).sum(axis=1), axis=1)
    return nearest
