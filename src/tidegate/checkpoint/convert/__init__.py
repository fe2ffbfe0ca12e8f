"""From a source checkpoint to an expert store: streaming, resumable, atomic. See docs/format.md."""

from tidegate.checkpoint.convert.cache import cached_store
from tidegate.checkpoint.convert.options import ConvertOptions
from tidegate.checkpoint.convert.write import Progress, convert

__all__ = ["ConvertOptions", "Progress", "cached_store", "convert"]
