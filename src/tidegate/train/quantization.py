"""Quantization-aware training: float32 masters to what int4 experts compute with (straight-through gradients).

Groups of 32 along the input dimension, one scale each: -(value of largest magnitude) / 8, as in llama.cpp's Q4_0.
The scale is rounded to bfloat16, so the largest weight of a group is exact in a bfloat16 checkpoint, and converting
that checkpoint to int4 again finds the same scales and codes.
"""

from __future__ import annotations

import torch

from tidegate.train.options import INT4_GROUP


def fake_int4(master: torch.Tensor) -> torch.Tensor:
    """The int4 value of every weight, float32, same shape; the last dimension is the input and a multiple of 32."""
    groups = master.reshape(-1, INT4_GROUP)
    top, bottom = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    largest = torch.where(top > -bottom, top, bottom)
    scale = (largest / -8).bfloat16().float()
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    codes = (groups * inverse).round().clamp_(-8, 7)
    return (codes * scale).view(master.shape)
