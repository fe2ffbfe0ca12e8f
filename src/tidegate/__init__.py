"""Tidegate runs Mixture-of-Experts language models that are larger than fast memory, inside a hard byte budget.

``tidegate.load("model", memory="8GiB")`` returns a Model; it is imported only then, so that the package stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.engine.model import Completion, Model, load

__version__ = "0.1.0"
__all__ = ["Completion", "Model", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in ("Completion", "Model", "load"):
        from tidegate.engine import model  # noqa: PLC0415

        return getattr(model, name)
    raise AttributeError(f"module 'tidegate' has no attribute {name!r}")
