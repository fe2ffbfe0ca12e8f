"""How much workspace a step of the CPU backend takes, before there is one: the decoder's allocations, counted.

Mirrors models/decoder.py and the ``Workspace`` uses of csrc/, block by block; a test compares it with the measured peak.
T tokens of a step, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tidegate.backends.operands import KvLayout
from tidegate.experts.gates_file import GATES_FORMAT
from tidegate.model_config import ModelConfig
from tidegate.quant.formats import Format
from tidegate.quant.layout import ExpertLayout
from tidegate.units import align_up

_ALIGNMENT = 64
_BATCH_PAIRS = 1024  # moe.cc: experts are computed together up to this many (token, expert) pairs
_KEY_BLOCK, _RUN_KEYS, _MAX_ROWS, _MAX_SPLIT_BYTES = 256, 1024, 48, 4 << 20  # attention_cached.cc
_PANEL_PAGES, _PASS_BYTES = 4, 16 << 20  # attention_kernels.h, attention_latent.cc


@dataclass(frozen=True)
class StepShape:
    """The largest step: T, R, positions of the longest sequence, compute threads."""

    tokens: int
    logit_rows: int
    context_tokens: int
    threads: int
    wide_inputs: bool = False


@dataclass(frozen=True)
class Activations:
    """Of the largest step. ``counted_bytes``: with memory reused between operators, an upper bound, close; ``unshared_bytes``: if
    every array had memory of its own until the step's end. ``measured_bytes``: in a dry run; 0 before there was one."""

    counted_bytes: int
    unshared_bytes: int
    measured_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """What is planned for them."""
        return max(self.counted_bytes, self.measured_bytes)


@dataclass(frozen=True)
class LayerKind:
    """``count`` layers that are alike, from ``first`` on: their experts, and the formats of their dense matrices by name."""

    first: int
    count: int
    layout: ExpertLayout | None
    formats: tuple[tuple[str, Format], ...]


def kinds_of_layers(
    config: ModelConfig, dense: Mapping[str, Format], layouts: Sequence[ExpertLayout]
) -> list[LayerKind]:
    """Most models have one or two."""
    formats: list[list[tuple[str, Format]]] = [[] for _ in config.moe_layers]
    for name, fmt in dense.items():
        if name.startswith("layers."):
            _, number, suffix = name.split(".")
            formats[int(number)].append((suffix, fmt))
    left = iter(layouts)
    kinds = [
        (next(left) if is_moe else None, tuple(found)) for is_moe, found in zip(config.moe_layers, formats, strict=True)
    ]
    return [LayerKind(kinds.index(kind), count, *kind) for kind, count in Counter(kinds).items()]


class _Level:
    """A bump allocator that only counts."""

    def __init__(self, wide_inputs: bool) -> None:
        self._wide_inputs = wide_inputs
        self._now = self.peak_bytes = self.unshared_bytes = 0

    def bytes(self, count: int) -> None:
        self._now = align_up(self._now, _ALIGNMENT) + count
        self.peak_bytes = max(self.peak_bytes, self._now)
        self.unshared_bytes = align_up(self.unshared_bytes, _ALIGNMENT) + count

    def matrix(self, rows: int, cols: int) -> None:
        self.bytes(4 * rows * cols)

    def prepared(self, fmt: Format, tokens: int, k: int) -> None:
        """PreparedRows of linear.cc: codes, scales and sums, or float32."""
        inputs = align_up(k, fmt.k_multiple)
        if not fmt.is_integer:
            self.matrix(tokens, inputs)
            return
        self.bytes(tokens * inputs)
        self.matrix(tokens, inputs // fmt.group)
        self.matrix(tokens, inputs // fmt.group)

    def linear(self, fmt: Format, tokens: int, n: int, k: int) -> None:
        self.matrix(tokens, n)
        with self.scratch():
            self.product(fmt, tokens, n, k)

    def product(self, fmt: Format, tokens: int, n: int, k: int) -> None:
        if not (self._wide_inputs and fmt.is_integer):
            self.prepared(fmt, tokens, k)
            return
        self.matrix(2 * tokens, n)
        self.prepared(fmt, 2 * tokens, k)
        self.prepared(fmt, tokens, k)
        self.matrix(tokens, k)

    @contextmanager
    def scratch(self) -> Iterator[None]:
        before = self._now
        yield
        self._now = before


class _Counter:
    def __init__(
        self,
        config: ModelConfig,
        dense: Mapping[str, Format],
        layouts: Sequence[ExpertLayout],
        kv: KvLayout,
        shape: StepShape,
    ) -> None:
        self._config, self._dense, self._layouts, self._kv, self._shape = config, dense, layouts, kv, shape
        self._level = _Level(shape.wide_inputs)

    def count(self) -> Activations:
        level, config, shape = self._level, self._config, self._shape
        level.matrix(shape.tokens, config.hidden_size)
        for kind in kinds_of_layers(config, self._dense, self._layouts):
            prefix = f"layers.{kind.first}."
            before = align_up(level.unshared_bytes, _ALIGNMENT)
            with level.scratch():
                if kind.layout is not None:
                    self._guess()
                (self._latent if config.attention.is_mla else self._grouped)(prefix)
            with level.scratch():
                if kind.layout is not None:
                    self._moe(prefix, kind.layout)
                else:
                    self._mlp(prefix, "gate_up", "down", config.dense_dim)
            level.unshared_bytes += (kind.count - 1) * (align_up(level.unshared_bytes, _ALIGNMENT) - before)
        level.matrix(shape.logit_rows, config.hidden_size)
        level.matrix(shape.logit_rows, config.hidden_size)
        head = self._dense["embed" if config.tied_embeddings else "head"]
        level.linear(head, shape.logit_rows, config.vocab_size, config.hidden_size)
        return Activations(level.peak_bytes, level.unshared_bytes)

    def _guess(self) -> None:
        """models/guesses.py, at the start of a layer."""
        level, moe = self._level, self._config.moe
        assert moe is not None
        with level.scratch():
            level.matrix(self._shape.tokens, self._config.hidden_size)
            level.linear(GATES_FORMAT, self._shape.tokens, moe.num_experts, self._config.hidden_size)

    def _grouped(self, prefix: str) -> None:
        level, att, tokens, hidden = self._level, self._config.attention, self._shape.tokens, self._config.hidden_size
        q_width, out_width = att.num_heads * att.head_dim, att.num_heads * att.v_head_dim
        level.matrix(tokens, hidden)
        rows = q_width + att.num_kv_heads * (att.head_dim + att.v_head_dim)
        level.linear(self._dense[prefix + "qkv"], tokens, rows, hidden)
        level.matrix(tokens, out_width)
        with level.scratch():
            level.matrix(tokens, q_width)
            level.matrix(self._shape.threads, q_width + 2 * max(att.head_dim, att.v_head_dim) + 16)
            self._cached(tokens, att.num_heads // att.num_kv_heads, att.head_dim, att.v_head_dim)
        level.linear(self._dense[prefix + "o"], tokens, hidden, out_width)

    def _latent(self, prefix: str) -> None:
        level, config, tokens, hidden = self._level, self._config, self._shape.tokens, self._config.hidden_size
        att, rope_dims = config.attention, config.rope.dims
        q_width, row = att.num_heads * (att.qk_nope_dim + rope_dims), att.kv_lora_rank + rope_dims
        level.matrix(tokens, hidden)
        if att.q_lora_rank:
            level.linear(self._dense[prefix + "q_a"], tokens, att.q_lora_rank, hidden)
            level.matrix(tokens, att.q_lora_rank)
            level.linear(self._dense[prefix + "q_b"], tokens, q_width, att.q_lora_rank)
        else:
            level.linear(self._dense[prefix + "q"], tokens, q_width, hidden)
        level.linear(self._dense[prefix + "kv_a"], tokens, row, hidden)
        level.matrix(tokens, att.num_heads * att.v_head_dim)
        with level.scratch():
            level.matrix(self._shape.threads, row)
            token_bytes = 4 * att.num_heads * (row + att.kv_lora_rank)
            one_pass = min(tokens, max(1, _PASS_BYTES // token_bytes))
            level.matrix(one_pass, att.num_heads * row)
            level.matrix(one_pass, att.num_heads * att.kv_lora_rank)
            for name, width in (("k_up", att.qk_nope_dim), ("v_up", att.kv_lora_rank)):
                with level.scratch():
                    for _ in range(att.num_heads):
                        level.prepared(self._dense[prefix + name], one_pass, width)
            with level.scratch():
                self._cached(one_pass, att.num_heads, row, att.kv_lora_rank)
        level.linear(self._dense[prefix + "o"], tokens, hidden, att.num_heads * att.v_head_dim)

    def _cached(self, tokens: int, group: int, k_dim: int, v_dim: int) -> None:
        """Scratch of each thread, and partial results of runs of keys when few queries are spread over threads."""
        shape, heads = self._shape, self._kv.kv_heads
        rows = min(_MAX_ROWS, tokens * group)
        partial = align_up(4 * rows * (v_dim + self._kv.page_tokens + 1) + 3 * _ALIGNMENT, _ALIGNMENT)
        panels = 0 if self._kv.v_dim else 4 * _PANEL_PAGES * k_dim * self._kv.page_tokens
        self._level.bytes(shape.threads * (3 * partial + 4 * rows * (_KEY_BLOCK + 2) + panels + 5 * _ALIGNMENT))
        runs = -(-shape.context_tokens // _RUN_KEYS)
        if shape.threads > 1 and runs > 1 and heads < 2 * shape.threads:
            self._level.bytes(min(_MAX_SPLIT_BYTES, 2 * shape.threads * runs * partial))

    def _mlp(self, prefix: str, gate_up: str, down: str, width: int) -> None:
        """norm and gated_mlp; the result stays."""
        level, tokens, hidden = self._level, self._shape.tokens, self._config.hidden_size
        level.matrix(tokens, hidden)
        self._gated(prefix, gate_up, down, width)

    def _gated(self, prefix: str, gate_up: str, down: str, width: int) -> None:
        level, tokens, hidden = self._level, self._shape.tokens, self._config.hidden_size
        level.matrix(tokens, hidden)
        with level.scratch():
            level.linear(self._dense[prefix + gate_up], tokens, 2 * width, hidden)
            level.product(self._dense[prefix + down], tokens, hidden, width)

    def _moe(self, prefix: str, layout: ExpertLayout) -> None:
        level, tokens, hidden, moe = self._level, self._shape.tokens, self._config.hidden_size, self._config.moe
        assert moe is not None
        pairs = tokens * moe.num_experts_per_tok
        level.matrix(tokens, hidden)
        with level.scratch():
            level.matrix(tokens, moe.num_experts)
        with level.scratch():  # models/guesses.py
            level.linear(GATES_FORMAT, tokens, moe.num_experts, hidden)
        if moe.shared_dim:
            self._gated(prefix, "shared_gate_up", "shared_down", moe.shared_dim)
        level.matrix(tokens, hidden)
        with level.scratch():
            level.matrix(pairs, hidden)
            level.prepared(layout.fmt, tokens, hidden)
            batch, experts = min(pairs, max(_BATCH_PAIRS, tokens)), min(pairs, moe.num_experts)
            level.prepared(layout.down_fmt, batch, moe.expert_dim)
            level.prepared(layout.fmt, batch, hidden)
            level.bytes(6 * experts * _ALIGNMENT)
        if moe.has_shared_gate:
            level.linear(self._dense[prefix + "shared_gate"], tokens, 1, hidden)


def activations(
    config: ModelConfig,
    dense: Mapping[str, Format],
    layouts: Sequence[ExpertLayout],
    kv: KvLayout,
    shape: StepShape,
) -> Activations:
    """``dense``: formats of the dense matrices; ``layouts``: one a MoE layer."""
    return _Counter(config, dense, layouts, kv, shape).count()
