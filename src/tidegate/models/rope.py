"""Rotary tables: inverse frequencies and the factor on cosine and sine, for every scaling, as transformers 5.23 computes
them in float32 (``modeling_rope_utils.py``).

linear: Chen et al. 2023; llama3: Llama 3.1; yarn: Peng et al. 2023 with DeepSeek's mscale pair and gpt-oss's ``truncate``;
longrope: Ding et al. 2024 with PhiMoE's ``short_mscale`` / ``long_mscale``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tidegate.backends.operands import F32Array, Rope
from tidegate.model_config import RopeConfig


def rope_table(rope: RopeConfig, context_tokens: int) -> Rope:
    """The table of a model that serves sequences of at most ``context_tokens``.

    Only longrope looks at it: above ``original_max_positions`` every sequence uses the long factors. One choice for the
    whole run, so that a token's result depends neither on its batch nor on how far its sequence has come.
    """
    inv_freq, factor = _SCALINGS[rope.scaling](rope, context_tokens)
    return Rope(np.ascontiguousarray(inv_freq, np.float32), factor, rope.interleaved)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature: 0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _positive_powers(rope: RopeConfig) -> F32Array:
    """theta ** (2i / dims), float32."""
    exponents = np.arange(0, rope.dims, 2, dtype=np.float32) / np.float32(rope.dims)
    powers: F32Array = np.power(np.float32(rope.theta), exponents, dtype=np.float32)
    return powers


def _default(rope: RopeConfig, _context_tokens: int) -> tuple[F32Array, float]:
    return np.float32(1) / _positive_powers(rope), 1.0


def _linear(rope: RopeConfig, _context_tokens: int) -> tuple[F32Array, float]:
    return np.float32(1) / _positive_powers(rope) / np.float32(rope.params["factor"]), 1.0


def _llama3(rope: RopeConfig, _context_tokens: int) -> tuple[F32Array, float]:
    params, original = rope.params, rope.original_max_positions
    factor, low, high = (np.float32(params[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    inv_freq = np.float32(1) / _positive_powers(rope)
    wavelength = np.float32(2 * math.pi) / inv_freq
    smooth = (np.float32(original) / wavelength - low) / (high - low)
    blended = (np.float32(1) - smooth) * inv_freq / factor + smooth * inv_freq
    long_waves, short_waves = wavelength > original / float(low), wavelength < original / float(high)
    return np.where(long_waves, inv_freq / factor, np.where(short_waves, inv_freq, blended)), 1.0


def _yarn(rope: RopeConfig, _context_tokens: int) -> tuple[F32Array, float]:
    params, factor = rope.params, float(rope.params["factor"])
    attention_factor = params.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = params.get("mscale"), params.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
        else:
            attention_factor = yarn_scale(factor)
    low, high = _yarn_range(rope, params)
    ramp = np.clip((np.arange(rope.dims // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = np.float32(1) - ramp.astype(np.float32)
    powers = _positive_powers(rope)
    inv_freq = np.float32(1) / (np.float32(factor) * powers) * (np.float32(1) - keep) + np.float32(1) / powers * keep
    return inv_freq, float(attention_factor)


def _yarn_range(rope: RopeConfig, params: dict[str, Any]) -> tuple[float, float]:
    """The dimensions between which extrapolation fades into interpolation."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return rope.dims * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(params.get("beta_fast") or 32.0), dimension(params.get("beta_slow") or 1.0)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    return low, high + 0.001 if low == high else high


def _longrope(rope: RopeConfig, context_tokens: int) -> tuple[F32Array, float]:
    params, original = rope.params, rope.original_max_positions
    reach = "long" if context_tokens > original else "short"
    inv_freq = np.float32(1) / (np.asarray(params[f"{reach}_factor"], np.float32) * _positive_powers(rope))
    if f"{reach}_mscale" in params:
        return inv_freq, float(params[f"{reach}_mscale"])
    factor, attention_factor = float(params["factor"]), params.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return inv_freq, float(attention_factor)


_SCALINGS: dict[str, Callable[[RopeConfig, int], tuple[F32Array, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
