"""Reading a checkpoint's config: typed look-ups that name the key when it is missing, of the wrong type or out of range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate.errors import CheckpointError

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


LARGEST = (1 << 31) - 1  # of any number in a config
MOST_LAYERS, MOST_EXPERTS = 4096, 65_536  # as many as traces can have of a layer


class ConfigKeys:
    """A config in Hugging Face terms. A key whose value is null counts as absent.

    Every look-up takes the names the key goes by and a default; without a default the key is required. All raise
    CheckpointError.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.raw = config
        self._where = where

    def error(self, message: str) -> CheckpointError:
        """The error to raise, with the family in front."""
        return CheckpointError(f"{self._where}: {message}")

    def integer(self, *names: str, default: int | None = None, minimum: int = 1, maximum: int = LARGEST) -> int:
        name, value = self._find(names, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            bound = f"at most {maximum}" if isinstance(value, int) and value > maximum else f"at least {minimum}"
            raise self.error(f"{name} must be a whole number of {bound}, got {value!r}")
        return value

    def num_layers(self) -> int:
        return self.integer("num_hidden_layers", maximum=MOST_LAYERS)

    def number(self, *names: str, default: float | None = None, positive: bool = True) -> float:
        name, value = self._find(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or (positive and value <= 0):
            raise self.error(f"{name} must be a number{' above zero' if positive else ''}, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        name, value = self._find((name,), default)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, got {value!r}")
        return value

    def items(self, name: str) -> list[Any] | None:
        """A list; None if there is none."""
        value = self.raw.get(name)
        if not isinstance(value, list | None):
            raise self.error(f"{name} must be a list, got {value!r}")
        return value

    def section(self, name: str) -> Mapping[str, Any]:
        """A config in the config; an empty one if there is none."""
        value = self.raw.get(name)
        if not isinstance(value, Mapping | None):
            raise self.error(f"{name} must be a mapping, got {value!r}")
        return value or {}

    def has(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def activation(self) -> str:
        name, value = self._find(("hidden_act",), "silu")
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self.error(f"{name} {value!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def require(self, name: str, wanted: Any) -> None:
        """Refuse a key that, when present, says something else than the family's contract."""
        value = self.raw.get(name)
        if value is not None and value != wanted:
            raise self.error(f"{name} is {value!r}; only {wanted!r} is supported")

    def token_id(self, name: str) -> int | None:
        return self.integer(name, minimum=0) if self.has(name) else None

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.raw.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            raise self.error(f"{name} must be a token id or a list of them, got {value!r}")
        return tuple(values)

    def _find(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        found = [name for name in names if self.raw.get(name) is not None]
        if not found:
            if default is None:
                raise self.error(f"{' or '.join(names)} is missing")
            return names[0], default
        if any(self.raw[name] != self.raw[found[0]] for name in found):
            raise self.error("contradiction: " + ", ".join(f"{name} = {self.raw[name]!r}" for name in found))
        return found[0], self.raw[found[0]]
