"""Every option once. The fields below make the CLI's flags, the keywords of ``tidegate.load`` and ``Model.generate``,
and the tables in the docs; an unknown keyword is an error that names the closest one.

A keyword is the field's name without its unit: ``memory`` fills ``memory_bytes``. A flag is the keyword with dashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from tidegate.errors import UsageError
from tidegate.units import parse_bytes

OptionKind = Literal["bytes", "int", "float", "flag", "text", "texts"]
T = TypeVar("T")

# "auto" keeps the source's own quantization where it can; everything else becomes int4 (experts) or int8 (dense).
# int4 has two-level scales; q4_0 a float16 scale a group, as GGUF has and as experts that are trained for int4 want it.
EXPERT_KINDS = ("auto", "int4", "q4_0", "int8", "mxfp4", "bf16", "f32")
DENSE_KINDS = ("auto", "int8", "int4", "bf16", "f32")


@dataclass(frozen=True)
class Option:
    """One row of the table. ``low`` and ``high`` bound numbers (inclusive); ``choices`` lists the allowed texts."""

    name: str
    kind: OptionKind
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def parse(self, value: object) -> Any:
        """The value as the engine uses it. Raises UsageError naming the flag, the value and what is allowed."""
        if value is None:
            if self.default is None:
                return None
            raise UsageError(f"{self.flag}: must not be None")
        if self.kind == "bytes":
            return self._bounded(value) if isinstance(value, int) else parse_bytes(str(value), self.flag)
        if self.kind == "flag":
            if not isinstance(value, bool):
                raise UsageError(f"{self.flag} {value!r}: must be True or False")
            return value
        if self.kind == "text":
            return self._chosen(str(value))
        if self.kind == "texts":
            return _texts(self.flag, value)
        return self._bounded(value)

    def _chosen(self, value: str) -> str:
        if self.choices and value not in self.choices:
            raise UsageError(
                f"{self.flag} {value!r}: must be one of {', '.join(self.choices)}{_closest(value, self.choices)}"
            )
        return value

    def _bounded(self, value: object) -> int | float:
        good = (int,) if self.kind in ("int", "bytes") else (int, float)
        if isinstance(value, bool) or not isinstance(value, good):
            raise UsageError(f"{self.flag} {value!r}: must be {'a whole number' if good == (int,) else 'a number'}")
        low, high = self.low, self.high
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            limits = f"at least {low}" if high is None else f"between {low} and {high}"
            raise UsageError(f"{self.flag} {value!r}: must be {limits}")
        return value if self.kind != "float" else float(value)


def _texts(flag: str, value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else None
    if texts is None or not all(isinstance(text, str) and text for text in texts):
        raise UsageError(f"{flag} {value!r}: must be a string or a list of strings, none of them empty")
    return texts


def _closest(word: str, known: tuple[str, ...] | list[str]) -> str:
    match = get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _option(kind: OptionKind, default: Any, text: str, **limits: Any) -> Any:
    return field(default=default, metadata={"kind": kind, "help": text, "limits": limits})


@dataclass(frozen=True)
class EngineOptions:
    """How a model is loaded. Sizes are ints; None means that the engine derives the value and prints it."""

    memory_bytes: int | None = _option(
        "bytes", None, "budget of the whole process, like 8GiB; default: what is available minus a reserve", low=1
    )
    reserve: int | None = _option(
        "int",
        None,
        "percent of memory that the default budget leaves to others; default: 10, or as much as they have taken during the last "
        "runs, up to 30",
        low=10,
        high=30,
    )
    context: int | None = _option(
        "int", None, "longest sequence in tokens, prompt and answer together; default: 4096 or the model's limit", low=2
    )
    sequences: int = _option("int", 1, "sequences that run at the same time", low=1, high=4096)
    prefill_chunk: int | None = _option(
        "int",
        None,
        "prompt tokens computed in one step; default: 256, or more where that saves loads and takes little of the budget",
        low=1,
        high=65536,
    )
    threads: int | None = _option(
        "int", None, "compute threads; default: the cores this process may use", low=1, high=1024
    )
    io_threads: int = _option("int", 1, "threads that read experts from disk", low=1, high=64)
    kv: str = _option("text", "f16", "format of the KV cache", choices=("f16", "int8", "f32"))
    activations: str = _option(
        "text",
        "auto",
        "precision in which dense integer weights take their inputs; auto: int16 for a model without experts, else int8",
        choices=("auto", "int8", "int16"),
    )
    policy: str = _option(
        "text", "decayed-lfu", "which expert is evicted", choices=("decayed-lfu", "lru", "lfu", "lfru", "resident-set")
    )
    prefetch: str = _option(
        "text", "auto", "load experts that the next layers will probably need, where it pays", choices=("auto", "off")
    )
    predictor: str = _option(
        "text",
        "auto",
        "what guesses the next layers' experts: auto (what fit-predictor left beside the model, else the routers themselves), "
        "gates (the routers themselves), last-token, window, decayed, or a file of fit-predictor",
    )
    experts: str | None = _option(
        "text", None, "format of routed experts, when converting; default: auto", choices=EXPERT_KINDS
    )
    dense: str | None = _option(
        "text", None, "format of all other weights, when converting; default: auto", choices=DENSE_KINDS
    )
    group: int | None = _option(
        "int", None, "weights that share one scale, when converting; default: 32", low=32, high=128
    )
    page_cache: bool = _option("flag", False, "read experts through the kernel's page cache instead of around it")
    backend: str = _option("text", "cpu", "who computes", choices=("cpu", "reference"))
    verify: bool = _option("flag", False, "check the checksum of every weight that is read")


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens of one sequence are chosen."""

    max_tokens: int | None = _option("int", None, "longest answer in tokens; default: up to the context's end", low=1)
    temperature: float = _option(
        "float", 0.0, "0 takes the most probable token; higher is more varied", low=0, high=100
    )
    top_k: int = _option("int", 0, "choose among the k most probable tokens; 0: all", low=0)
    top_p: float = _option("float", 1.0, "choose among the fewest tokens that reach this probability", low=0, high=1)
    min_p: float = _option(
        "float", 0.0, "drop tokens less probable than this share of the most probable one", low=0, high=1
    )
    repetition_penalty: float = _option(
        "float", 1.0, "above 1 makes tokens seen before less likely", low=0.01, high=100
    )
    presence_penalty: float = _option(
        "float", 0.0, "subtracted once from the logits of generated tokens", low=-100, high=100
    )
    frequency_penalty: float = _option(
        "float", 0.0, "subtracted per occurrence of generated tokens", low=-100, high=100
    )
    seed: int = _option("int", 0, "same seed, same answer", low=0, high=2**63 - 1)
    stop: tuple[str, ...] = _option("texts", (), "end the answer before this text; may be given several times")
    ignore_eos: bool = _option("flag", False, "go on after the model's end-of-text token")
    logprobs: int | None = _option(
        "int", None, "also return the log probabilities of this many tokens", low=0, high=100
    )

    @property
    def is_plain_greedy(self) -> bool:
        """The most probable token, with nothing added to or taken from any logit."""
        no_penalty = self.repetition_penalty == 1.0 and not self.presence_penalty and not self.frequency_penalty
        return no_penalty and (self.temperature == 0.0 or self.top_k == 1)


def option_table(cls: type[Any]) -> dict[str, Option]:
    """Rows of an options class, by keyword, in order."""
    rows = {}
    for item in fields(cls):
        name = item.name.removesuffix("_bytes")
        rows[name] = Option(name, item.metadata["kind"], item.default, item.metadata["help"], **item.metadata["limits"])
    return rows


def parse_options(cls: type[T], keywords: Mapping[str, object]) -> T:
    """Build an options object from keywords. Raises UsageError on an unknown keyword (naming the closest) or a bad value."""
    table = option_table(cls)
    values = {}
    for keyword, value in keywords.items():
        if keyword not in table:
            raise UsageError(
                f"unknown option {keyword!r}{_closest(keyword, list(table)) or '; known: ' + ', '.join(table)}"
            )
        row = table[keyword]
        values[keyword + ("_bytes" if row.kind == "bytes" else "")] = row.parse(value)
    return cls(**values)


def split_options(keywords: Mapping[str, Any], *classes: type[Any]) -> list[dict[str, Any]]:
    """Deal keywords to the classes that know them. Raises UsageError on one that no class knows."""
    tables = [option_table(cls) for cls in classes]
    known = [name for table in tables for name in table]
    for keyword in keywords:
        if keyword not in known:
            raise UsageError(f"unknown option {keyword!r}{_closest(keyword, known) or '; known: ' + ', '.join(known)}")
    return [{name: keywords[name] for name in table if name in keywords} for table in tables]


def markdown_table(cls: type[Any]) -> str:
    """The options as the docs show them."""
    lines = ["| flag | keyword | default | |", "|---|---|---|---|"]
    for row in option_table(cls).values():
        choices = f" ({', '.join(row.choices)})" if row.choices else ""
        default = "" if row.default is None else f"`{row.default}`"
        lines.append(f"| `{row.flag}` | `{row.name}` | {default} | {row.help}{choices} |")
    return "\n".join(lines) + "\n"
