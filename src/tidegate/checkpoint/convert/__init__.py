"""From a source checkpoint to an expert store: streaming, resumable, atomic. See docs/format.md.

What writes is imported when it is first asked for: the planner only wants to know what would be written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.checkpoint.convert.options import ConvertOptions

if TYPE_CHECKING:
    from tidegate.checkpoint.convert.cache import cached_store
    from tidegate.checkpoint.convert.write import Progress, convert

__all__ = ["ConvertOptions", "Progress", "cached_store", "convert"]


def __getattr__(name: str) -> Any:
    if name == "cached_store":
        from tidegate.checkpoint.convert import cache  # noqa: PLC0415

        return cache.cached_store
    if name in ("Progress", "convert"):
        from tidegate.checkpoint.convert import write  # noqa: PLC0415

        return getattr(write, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
