"""How well a model predicts texts, and how close it is to a reference model on the same tokens.

A text is cut into windows that overlap by one token, so every token but the text's first is predicted once, from at most
``window`` tokens before it.

T tokens of a window, V vocabulary, L layers with experts, K experts per token.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.engine.model import Model
from tidegate.errors import UsageError
from tidegate.experts.trace import TraceReader

F32Array = NDArray[np.float32]


@dataclass(frozen=True)
class Window:
    """``inputs`` and the token after each of them, both int [T]."""

    inputs: list[int]
    targets: list[int]


@dataclass(frozen=True)
class BusiestExpert:
    """The expert that the largest share of a text's tokens uses; ``layer`` counts layers with experts."""

    layer: int
    expert: int
    token_ratio: float


@dataclass(frozen=True)
class TextScore:
    """Sums over a text's predicted tokens; ``num_bytes`` is its length in UTF-8. ``busiest`` is None without experts."""

    name: str
    num_tokens: int
    num_bytes: int
    nll: float
    busiest: BusiestExpert | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.num_tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nll / math.log(2) / self.num_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.name,
            "tokens": self.num_tokens,
            "bytes": self.num_bytes,
            "perplexity": round(self.perplexity, 4),
            "bits_per_byte": round(self.bits_per_byte, 5),
            **({"busiest_expert": asdict(self.busiest)} if self.busiest else {}),
        }


@dataclass(frozen=True)
class Agreement:
    """With the reference, over ``num_tokens``: mean KL divergence of its distribution from the model's in nats, share of
    positions with the same most probable token, and share of expert choices in common (None where the two models'
    experts cannot be compared)."""

    num_tokens: int
    kl_nats: float
    top1_ratio: float
    routing_ratio: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "compared_tokens": self.num_tokens,
            "kl_nats": round(self.kl_nats, 6),
            "top1_agreement_ratio": round(self.top1_ratio, 5),
            "routing_agreement_ratio": None if self.routing_ratio is None else round(self.routing_ratio, 5),
        }


def shorten(model: Model, text: str, max_tokens: int) -> str:
    """The longest prefix of the text that has at most ``max_tokens`` tokens. What is far behind it is not looked at."""
    low, high = 0, min(len(text), 4 * max_tokens)
    while high < len(text) and len(model.encode(text[:high])) <= max_tokens:
        low, high = high, min(len(text), 2 * high)
    middle = high
    while low < high:
        if len(model.encode(text[:middle])) <= max_tokens:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return text[:low]


def cut(model: Model, name: str, text: str, window: int) -> list[Window]:
    """Windows over all tokens of a text. Raises UsageError for a text of fewer than two tokens."""
    ids = model.encode(text)
    if len(ids) < 2:
        raise UsageError(f"{name}: has {len(ids)} tokens; at least 2 are needed to predict one")
    starts = range(0, len(ids) - 1, window)
    return [Window(ids[at : at + window][: len(ids) - 1 - at], ids[at + 1 : at + 1 + window]) for at in starts]


def log_probabilities(model: Model, window: Window) -> F32Array:
    """float32 [T, V], natural logarithm."""
    logits_TV = model.logits(window.inputs)
    for logits_V in logits_TV:  # in place and row by row: the ledger knows of no other array
        logits_V -= logits_V.max()
        logits_V -= np.log(np.exp(logits_V).sum())
    return logits_TV


def score(
    model: Model, name: str, text: str, window: int, advance: Callable[[int], None] = lambda tokens: None
) -> TextScore:
    """Predict a text; ``advance`` gets the tokens of each window that is done. Raises UsageError as :func:`cut` does."""
    nll, count, busiest = 0.0, 0, None
    with tempfile.TemporaryDirectory(prefix="tidegate-eval-") as folder:
        trace = Path(folder) / "trace" if model.runtime.experts is not None else None
        with model.trace(trace) if trace else nullcontext():
            for part in cut(model, name, text, window):
                log_probs_TV = log_probabilities(model, part)
                nll -= float(log_probs_TV[np.arange(len(part.targets)), part.targets].sum(dtype=np.float64))
                count += len(part.targets)
                advance(len(part.targets))
        if trace:
            busiest = _busiest(trace)
    return TextScore(name, count, len(text.encode()), nll, busiest)


def _busiest(trace: Path) -> BusiestExpert:
    reader = TraceReader(trace)
    uses_LE = np.zeros((reader.meta.num_layers, reader.meta.num_experts))
    tokens = 0
    for chunk in reader:
        tokens += len(chunk.experts)
        for layer, uses_E in enumerate(uses_LE):
            uses_E += np.bincount(chunk.experts[:, layer].ravel(), minlength=len(uses_E))
    reader.close()
    busiest_layer, expert = np.unravel_index(uses_LE.argmax(), uses_LE.shape)
    return BusiestExpert(int(busiest_layer), int(expert), round(float(uses_LE.max()) / tokens, 4))


class Recording:
    """A model's distributions and routing on some windows, in a temporary folder; close it to delete them."""

    def __init__(
        self, model: Model, windows: list[Window], advance: Callable[[int], None] = lambda tokens: None
    ) -> None:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-eval-")))
        self._paths: list[Path] = []
        self._trace = folder / "trace" if model.runtime.experts is not None else None
        with model.trace(self._trace) if self._trace else ExitStack():
            for number, window in enumerate(windows):
                path = folder / f"{number}.npy"
                np.save(path, log_probabilities(model, window))
                self._paths.append(path)
                advance(len(window.inputs))

    def close(self) -> None:
        self._stack.close()

    def distributions(self) -> Iterator[F32Array]:
        for path in self._paths:
            yield np.load(path)

    def experts(self) -> NDArray[Any] | None:
        """Sorted expert ids [tokens, L, K]."""
        if self._trace is None:
            return None
        reader = TraceReader(self._trace)
        try:
            return np.sort(np.concatenate([chunk.experts for chunk in reader]), axis=-1)
        finally:
            reader.close()


def compare(model: Recording, reference: Recording) -> Agreement:
    """Both must have recorded the same windows. Raises UsageError where the vocabularies differ."""
    divergence, same, count = 0.0, 0, 0
    for ours_TV, theirs_TV in zip(model.distributions(), reference.distributions(), strict=True):
        if ours_TV.shape != theirs_TV.shape:
            raise UsageError(
                f"--reference has {theirs_TV.shape[1]} tokens in its vocabulary, the model {ours_TV.shape[1]}: not comparable"
            )
        divergence += float((np.exp(theirs_TV) * (theirs_TV - ours_TV)).sum(dtype=np.float64))
        same += int((ours_TV.argmax(-1) == theirs_TV.argmax(-1)).sum())
        count += len(ours_TV)
    return Agreement(count, divergence / count, same / count, _routing_ratio(model.experts(), reference.experts()))


def _routing_ratio(ours: NDArray[Any] | None, theirs: NDArray[Any] | None) -> float | None:
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return None
    common = (ours[..., :, None] == theirs[..., None, :]).any(-1)
    return float(common.mean())
