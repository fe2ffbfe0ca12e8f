"""Packed weight formats: what a weight matrix looks like in memory and on disk, to the byte.

A matrix ``w_NK`` (N outputs, K inputs) is cut into panels of 16 output rows. Inside a panel everything is
interleaved so that one 64-byte vector holds the same inputs of all 16 rows; kernels broadcast an activation and
never sum across lanes. N is padded to 16 and K to ``k_multiple``; padding holds zeros (codes equal to the offset).

``f32``     panel = [K][16] float32
``bf16``    panel = [K/2][16][2] bfloat16, inputs 2j and 2j+1 of a row are neighbours
integers    panel = [K/G] groups, each group = 16 float16 scales, then 16 float16 minima if ``has_min``, then codes:
  ``int8``  [G/4][16][4] bytes, code = round(w/scale) + 128           w = scale * (code - 128)
  ``int4``  [G/8][16][4] bytes; byte b of row r in step j holds input 8j+b in the low nibble and 8j+4+b in the
            high nibble; code = round(w/scale) + 8                    w = scale * (code - 8)
  ``mxfp4`` like int4, but the nibble indexes MXFP4_VALUES (twice the OCP FP4 E2M1 values)   w = scale * MXFP4_VALUES[code]
  with ``has_min`` the offset is 0: code = round((w - min)/scale), w = scale * code + min, so that GGUF's scale-and-minimum
  blocks (Q4_1, Q5_1, Q2_K, Q4_K, Q5_K) keep both numbers as they are (``code_offset``)

``int4`` with two-level scales (``-m8``) has one float32 scale a row and an int8 multiplier, -127 to 127, a group:
    panel = blocks of MULTIPLIER_GROUPS groups, each block = [MULTIPLIER_GROUPS][16] multipliers (64 bytes), then the groups'
    codes as above; then 16 float32 row scales. A last block may have fewer groups: the multipliers of those it lacks are 0,
    their codes are not there. Every vector of codes starts at a multiple of 64 bytes.  w = row_scale * (multiplier * (code - 8))

``group`` G is 16, 32, 64 or 128 for int8 and int4, not 16 for ``-m8``, 32 for mxfp4. Activations meet integer weights as int8
with one float32 scale per token and group of G inputs: scale = max|x|/127, code = round-half-even(x / scale), and
    per group, in order: acc = fma(int_dot, w_scale * x_scale, acc); with has_min then acc = fma(w_min * x_scale, x_code_sum, acc)
    two levels: acc = fma(multiplier * int_dot, x_scale, acc), and after the last group acc = row_scale * acc
where int_dot = sum((code - code_offset) * x_code) and x_code_sum = sum(x_code),
which every kernel reproduces bit for bit (integer sums are exact; one fixed order of float operations). multiplier * int_dot
is below 2^24, so it is exact whether it is taken in integers or in floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tidegate.errors import UsageError
from tidegate.units import align_up

Kind = Literal["f32", "bf16", "int8", "int4", "mxfp4"]
KINDS: tuple[Kind, ...] = ("f32", "bf16", "int8", "int4", "mxfp4")
GROUPS = (16, 32, 64, 128)
MULTIPLIER_GROUPS = 4
PANEL_ROWS = 16
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_CODE_BITS = {"f32": 32, "bf16": 16, "int8": 8, "int4": 4, "mxfp4": 4}


@dataclass(frozen=True)
class Format:
    """One packed format. ``group`` is 0 and ``has_min`` False for f32 and bf16; ``two_level`` scales are for int4."""

    kind: Kind
    group: int = 0
    has_min: bool = False
    two_level: bool = False

    def __post_init__(self) -> None:
        if self.kind in ("f32", "bf16"):
            good = self.group == 0 and not self.has_min
        elif self.kind == "mxfp4":
            good = self.group == 32 and not self.has_min
        else:
            good = self.kind in KINDS and self.group in GROUPS
        if self.two_level:
            good = good and self.kind == "int4" and self.group > 16 and not self.has_min
        if not good:
            raise UsageError(f"no such weight format: {self}")

    @staticmethod
    def parse(text: str) -> Format:
        """Inverse of ``str``: ``f32``, ``bf16``, ``int8-g32``, ``int4-g64-min``, ``int4-g32-m8``, ``mxfp4-g32``."""
        kind, *rest = text.split("-")
        group = next((int(part[1:]) for part in rest if part[:1] == "g" and part[1:].isdigit()), 0)
        fmt = Format(kind, group, "min" in rest, "m8" in rest)  # type: ignore[arg-type]  # checked in __post_init__
        if str(fmt) != text:
            raise UsageError(f"no such weight format: {text!r}")
        return fmt

    def __str__(self) -> str:
        group = f"-g{self.group}" if self.group else ""
        return self.kind + group + ("-min" if self.has_min else "") + ("-m8" if self.two_level else "")

    @property
    def is_integer(self) -> bool:
        """Whether activations are quantized to int8 for this format."""
        return self.group > 0

    @property
    def code_offset(self) -> int:
        """What is subtracted from a code before scaling: 128 (int8), 8 (int4), 0 for mxfp4 and with minima."""
        return 0 if self.has_min else {"int8": 128, "int4": 8}.get(self.kind, 0)

    @cached_property
    def k_multiple(self) -> int:
        """K is padded to a multiple of this."""
        return self.group or (2 if self.kind == "bf16" else 1)

    def padded(self, n: int, k: int) -> tuple[int, int]:
        """N and K as stored."""
        return align_up(n, PANEL_ROWS), align_up(k, self.k_multiple)

    def packed_bytes(self, n: int, k: int) -> int:
        """Exact size of a packed [n, k] matrix, scales, minima and padding included."""
        rows, inputs = self.padded(n, k)
        return rows * inputs * _CODE_BITS[self.kind] // 8 + rows * self.scale_bytes(inputs)

    def scale_bytes(self, k: int) -> int:
        """Bytes of a row's scales, and minima or multipliers, padding included."""
        groups = -(-k // self.group) if self.group else 0
        if self.two_level:
            return 4 + align_up(groups, MULTIPLIER_GROUPS)
        return groups * (4 if self.has_min else 2)

    def bits_per_weight(self, n: int, k: int) -> float:
        """Real bits a weight, scales and padding included."""
        return 8 * self.packed_bytes(n, k) / (n * k)
