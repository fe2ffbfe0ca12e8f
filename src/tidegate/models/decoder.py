"""The decoder: one config-driven transformer for every family, written against the Backend.

T tokens of the step, D hidden, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from tidegate.backends.base import A, Backend
from tidegate.backends.operands import DecoderLayer, F32Array, StepBatch
from tidegate.experts.cache import ExpertCache
from tidegate.model_config import ModelConfig
from tidegate.models.attention import GroupedAttention, LatentAttention
from tidegate.models.moe import Activation, Experts, MoeBlock
from tidegate.models.weights import LatentAttentionWeights, LayerWeights, MlpWeights, ModelWeights


class Mlp(Generic[A]):
    """The feed-forward half of a layer without experts."""

    def __init__(self, weights: MlpWeights, activation: Activation, backend: Backend[A]) -> None:
        self._weights, self._activation, self._backend = weights, activation, backend

    def __call__(self, x: A) -> A:
        """[T, D] -> [T, D], to be added to x."""
        backend, weights = self._backend, self._weights
        return backend.gated_mlp(backend.norm(x, weights.norm), weights.gate_up, weights.down, self._activation)


class Decoder(Generic[A]):
    """``experts`` is None for a model without MoE layers. The backend's KV pages are bound before the first ``forward``."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, backend: Backend[A], experts: Experts | None = None
    ) -> None:
        self.config, self.weights, self.backend, self.experts = config, weights, backend, experts
        self._activation: Activation = (config.activation, config.activation_alpha, config.activation_limit)
        self._whole: tuple[ExpertCache | None, tuple[DecoderLayer, ...]] = None, ()  # of that cache
        self._blocks = [block for layer in weights.layers for block in self._layer_blocks(layer)]

    @property
    def guess_width(self) -> int:
        """How many experts a guess names at most; 0 without experts."""
        return self.experts.guesser.width if self.experts and self.experts.guesser else 0

    def forward(self, batch: StepBatch) -> F32Array:
        """float32 [R, V], valid until the next call. Writes the step's tokens into their KV pages.

        Raises ReadFailed or CorruptFile when an expert cannot be read; the same step may be tried again.
        """
        backend, scale = self.backend, self.config.residual_multiplier
        backend.begin(batch)
        x = backend.embed(self.weights.embed, self.config.embedding_multiplier)
        mark = backend.mark()
        if self.experts is not None:
            self.experts.begin_step(len(batch.token_ids_T))
        for block in self._blocks[self._run_whole(x, len(batch.token_ids_T)) :]:
            backend.add(x, block(x), scale)
            backend.release(mark)
        return backend.logits(x, self.weights.final_norm, self.weights.head, self.config.logits_divisor)

    def _run_whole(self, x: A, num_rows: int) -> int:
        """How many blocks the backend could run in one call."""
        experts = self.experts
        if experts is None or not experts.runs_whole(num_rows):
            return 0
        if self._whole[0] is not experts.cache:
            self._whole = experts.cache, self._whole_layers(experts.cache)
        layers = self._whole[1]
        if not layers:
            return 0
        experts.cache.deal()
        done, failed_slot = self.backend.run_layers(x, layers, self.config.residual_multiplier, experts.sights or ())
        experts.raise_failure(failed_slot)
        return done

    def _whole_layers(self, cache: ExpertCache) -> tuple[DecoderLayer, ...]:
        """All layers, if they are of the kind that a backend may know as a whole and a native cache serves them."""
        layers = []
        for number, (layer, block) in enumerate(zip(self.weights.layers, self._blocks[1::2], strict=True)):
            attention = layer.attention
            if isinstance(attention, LatentAttentionWeights) or not isinstance(block, MoeBlock):
                return ()
            native = cache.native(number)
            if native is None or block.layer.shared_gate_up is not None:
                return ()
            layers.append(DecoderLayer(attention, block.layer, native))
        return tuple(layers)

    def _layer_blocks(self, layer: LayerWeights) -> tuple[Callable[[A], A], Callable[[A], A]]:
        attention: Callable[[A], A]
        if isinstance(layer.attention, LatentAttentionWeights):
            attention = LatentAttention(layer.attention, self.backend)
        else:
            attention = GroupedAttention(layer.attention, self.backend)
        if isinstance(layer.feed_forward, MlpWeights):
            return attention, Mlp(layer.feed_forward, self._activation, self.backend)
        assert self.experts is not None
        moe = MoeBlock(layer.feed_forward, self._activation, self.backend, self.experts)

        def announced(x: A) -> A:
            moe.at_start(x)
            return attention(x)

        return announced, moe
