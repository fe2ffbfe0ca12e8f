"""Text in and out of one model: its tokenizer and chat template, either of which a checkpoint may lack."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

from tidegate.checkpoint.store import ExpertStore
from tidegate.engine.text import TextStream
from tidegate.errors import UsageError
