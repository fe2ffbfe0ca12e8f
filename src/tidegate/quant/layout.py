"""Layout of one expert's blob, in the store and in a slot alike: a read lands it ready to compute."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.quant.formats import Format
from tidegate.units import align_up


@dataclass(frozen=True)
class ExpertLayout:
    """Where the parts of an expert's blob are: packed gate [F, D], up [F, D], down [D, F], then float32 biases
    gate [F], up [F], down [D] when the model has them; every part starts 64-byte aligned. Gate and up are in ``fmt``,
    down is in ``down_fmt`` (GGUF's K-quant mixes give it more bits)."""

    hidden_size: int
    expert_dim: int
    fmt: Format
    down_fmt: Format
    has_bias: bool
    up_offset: int
    down_offset: int
    bias_offset: int
    blob_bytes: int  # padded to 4096

    @staticmethod
    def of(
        hidden_size: int, expert_dim: int, fmt: Format, has_bias: bool, down_fmt: Format | None = None
    ) -> ExpertLayout:
        """The layout of these shapes; ``down_fmt`` None means the same format as gate and up."""
        down_fmt = down_fmt or fmt
        up = align_up(fmt.packed_bytes(expert_dim, hidden_size), 64)
        down = 2 * up
        bias = down + align_up(down_fmt.packed_bytes(hidden_size, expert_dim), 64)
        end = bias + (align_up(4 * expert_dim, 64) * 2 + align_up(4 * hidden_size, 64) if has_bias else 0)
        return ExpertLayout(hidden_size, expert_dim, fmt, down_fmt, has_bias, up, down, bias, align_up(end, 4096))
