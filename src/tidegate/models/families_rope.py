"""RopeConfig from a checkpoint's config: ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling`` (before)."""

from __future__ import annotations

from typing import Any

from tidegate.model_config import RopeConfig, RopeScaling
from tidegate.models.config_keys import ConfigKeys

_KINDS: dict[str, RopeScaling] = {
    "default": "default",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("factor", "short_factor", "long_factor"),
}
_NOT_PARAMS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def rope_config(
    keys: ConfigKeys, head_dim: int, *, theta: float = 10000.0, partial: float = 1.0, interleaved: bool = False
) -> RopeConfig:
    """``theta``, ``partial`` and ``interleaved`` are the family's defaults; GGUF files of some families are permuted and say so.
    Raises CheckpointError naming the key."""
    params = _merged(keys)
    kind = params.get("rope_type", params.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise keys.error(f"rope_type {kind!r} is not supported; supported are {', '.join(_KINDS)}")
    scaling = _KINDS[kind]
    inner = ConfigKeys({**keys.raw, **params}, "rope_parameters")
    dims = int(head_dim * inner.number("partial_rotary_factor", default=partial))
    if dims % 2 or not 0 < dims <= head_dim:
        raise keys.error(f"rotary embedding of {dims} of {head_dim} dimensions is not supported (must be even)")
    max_positions = keys.integer("max_position_embeddings")
    # Phi's top-level key wins over the one inside, as in transformers.
    original = (keys if keys.has("original_max_position_embeddings") else inner).integer(
        "original_max_position_embeddings", default=max_positions
    )
    extra = {k: v for k, v in params.items() if k not in _NOT_PARAMS and v is not None}
    if scaling in ("yarn", "longrope"):
        extra.setdefault("factor", max_positions / original)
    for name in _NEEDED[scaling]:
        if name not in extra:
            raise keys.error(f"{name} is missing from the rope parameters (rope_type {kind!r})")
    _check_factors(keys, extra, dims)
    return RopeConfig(
        dims=dims,
        theta=inner.number("rope_theta", default=theta),
        interleaved=keys.flag("tidegate_rope_interleaved", default=interleaved),
        scaling=scaling,
        original_max_positions=original,
        params=extra if scaling != "default" else {},
    )


def _merged(keys: ConfigKeys) -> dict[str, Any]:
    """The rope parameters as one flat dict."""
    params: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = keys.section(name)
        if any(isinstance(inner, dict) for inner in value.values()):
            raise keys.error(
                f"{name} differs per layer type ({', '.join(value)}); only one for all layers is supported"
            )
        params.update(value)
    return params


def _check_factors(keys: ConfigKeys, params: dict[str, Any], dims: int) -> None:
    for name, value in params.items():
        if name in ("short_factor", "long_factor"):
            if not isinstance(value, list) or len(value) != dims // 2:
                raise keys.error(f"{name} must be a list of {dims // 2} numbers, got {value!r}")
        elif name == "factor" and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise keys.error(f"rope factor must be a number above zero, got {value!r}")
