"""What one model with one set of options needs, in bytes by owner. Reads headers only.

T tokens of a step, R rows whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tidegate.backends.base import KvLayout
from tidegate.checkpoint.store import ExpertStore
from tidegate.config import EngineOptions
from tidegate.errors import UsageError
from tidegate.memory.arena import PAGE_BYTES
from tidegate.memory.probe import ProcessMemory
from tidegate.model_config import ModelConfig
from tidegate.plan import Needs, WayOut
from tidegate.units import align_up

DEFAULT_CONTEXT_TOKENS = 4096
SMALL_CONTEXT_TOKENS, SMALL_CHUNK_TOKENS = 1024, 32
# Measured: what Python and the libraries still take after the measurement, and what one thread takes.
GROWTH_BYTES, THREAD_BYTES = 1 << 20, 64 << 10
# Float64 copies of one row of logits that the sampler holds at its peak, and Python objects of one expert or layer.
SAMPLER_BYTES_PER_LOGIT, OBJECT_BYTES_PER_LAYER = 48, 16 << 10


@dataclass(frozen=True)
class Sizes:
    """Options turned into numbers for one model."""

    context_tokens: int
    sequences: int
    prefill_chunk: int
    num_pages: int
    kv: KvLayout

    @property
    def step_tokens(self) -> int:
        """The largest T."""
        return self.prefill_chunk + self.sequences - 1


def sizes_of(config: ModelConfig, options: EngineOptions) -> Sizes:
    """Raises UsageError for a context longer than the model was made for."""
    context = options.context or min(DEFAULT_CONTEXT_TOKENS, config.max_positions)
    if context > config.max_positions:
        raise UsageError(f"--context {context}: the model was made for {config.max_positions} positions")
    kv = KvLayout.of(config.attention, config.rope, config.num_layers, options.kv)
    chunk = min(options.prefill_chunk, context)
    return Sizes(context, options.sequences, chunk, options.sequences * -(-context // kv.page_tokens), kv)


def needs_of(store: ExpertStore, options: EngineOptions, process: ProcessMemory, num_threads: int) -> Needs:
    """``process``: a measurement after everything that is loaded before the arena; ``num_threads`` will be started."""
    config, moe = store.config, store.config.moe
    sizes = sizes_of(config, options)
    growth = GROWTH_BYTES + num_threads * THREAD_BYTES + config.num_layers * OBJECT_BYTES_PER_LAYER
    return Needs(
        runtime_bytes=process.rss_bytes,
        growth_bytes=growth + SAMPLER_BYTES_PER_LOGIT * config.vocab_size,
        dense_bytes=store.dense_bytes,
        kv_bytes=align_up(sizes.num_pages * sizes.kv.page_bytes, PAGE_BYTES),
        workspace_bytes=align_up(workspace_bytes(config, sizes.step_tokens, sizes.sequences), PAGE_BYTES),
        staging_bytes=0,
        slot_bytes=max((layout.blob_bytes for layout in store.layouts), default=0),
        num_layers=len(store.layouts),
        num_experts=moe.num_experts if moe else 0,
        min_slots=moe.num_experts_per_tok if moe else 0,
        start_peak_bytes=process.peak_rss_bytes,
    )


def ways_out(store: ExpertStore, options: EngineOptions, process: ProcessMemory, num_threads: int) -> list[WayOut]:
    """Flags that would lower the smallest budget, each tried alone."""
    tries = {
        f"--context {SMALL_CONTEXT_TOKENS}": replace(
            options, context=min(SMALL_CONTEXT_TOKENS, store.config.max_positions)
        ),
        "--sequences 1": replace(options, sequences=1),
        f"--prefill-chunk {SMALL_CHUNK_TOKENS}": replace(options, prefill_chunk=SMALL_CHUNK_TOKENS),
        "--kv f16": replace(options, kv="f16"),
    }
    return [
        WayOut(flag, needs_of(store, tried, process, num_threads).smallest_bytes)
        for flag, tried in tries.items()
        if tried != options
    ]


def workspace_bytes(config: ModelConfig, tokens: int, logit_rows: int) -> int:
    """Upper bound of what one step's arrays take: the residual stream plus the largest block's own."""
    att, moe, hidden = config.attention, config.moe, config.hidden_size
    if att.is_mla:
        q = att.num_heads * (att.qk_nope_dim + config.rope.dims)
        latent = att.kv_lora_rank + config.rope.dims
        attention = hidden + 2 * att.q_lora_rank + q + latent + 2 * att.num_heads * (latent + att.v_head_dim)
    else:
        attention = hidden + 2 * ((att.num_heads + att.num_kv_heads) * att.head_dim + att.num_kv_heads * att.v_head_dim)
        attention += att.num_heads * att.v_head_dim
    blocks = [attention + hidden, 3 * config.dense_dim + 2 * hidden]
    if moe is not None:
        pairs = moe.num_experts_per_tok * (hidden + 3 * moe.expert_dim)
        blocks.append(2 * moe.num_experts + 4 * moe.shared_dim + pairs + 3 * hidden)
    step = 4 * tokens * (hidden + max(blocks))
    logits = 4 * (tokens * hidden + logit_rows * (2 * hidden + config.vocab_size))
    return max(step, logits)


def scored_rows(config: ModelConfig, sizes: Sizes, workspace: int) -> int:
    """How many rows of logits a step can have, when every array of the layers is gone; at least one a sequence."""
    left = workspace - 4 * sizes.step_tokens * config.hidden_size
    rows = left // (4 * (2 * config.hidden_size + config.vocab_size))
    return max(sizes.sequences, min(rows, sizes.prefill_chunk))
