"""Held-out quality of a training checkpoint: bits per byte by domain against 5-grams, use of experts, odd inputs.

Run ``python -m tidegate.train.evaluate RUN TOKENS DEST``: writes ``quality.json`` and ``experts.png`` into DEST.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from tidegate.train import checkpoint
from tidegate.train.data import Sampler, heldout_windows
from tidegate.train.model import Model
from tidegate.train.moe import Router
from tidegate.train.ngram import KneserNey
from tidegate.train.optimizer import Optimizer
from tidegate.train.options import TrainOptions
from tidegate.train.weights import Buffers, parameters_of

BATCH = 8
ODD_TEXTS = {
    "emoji": "😀🎉🏳️‍🌈👩‍👩‍👧🔥" * 30,
    "one symbol": "§",
    "4 KB of one character": "a" * 4096,
    "control characters": "\x00\x01\x07\x08\x1b[31m\x7f" * 40,
    "right to left": "שלום עולם، مرحبا بالعالم. " * 20,
}


def load_model(state: dict[str, Any]) -> Model:
    """The model of a checkpoint as its next step would compute it, plain kernels."""
    options = TrainOptions.from_json(json.loads(state["options"]))
    parameters = parameters_of(options.architecture)
    masters, weights = Buffers(parameters, "master"), Buffers(parameters, "weight")
    masters.full.copy_(state["masters"])
    Optimizer(options, parameters, masters.views(), {}, {}, weights.views(), []).publish_all(state["step"])
    routers = [Router(options.architecture, options.router) for _ in range(options.architecture.num_layers)]
    for router, saved in zip(routers, state["routers"][0], strict=True):
        for tensor, value in zip(router.state(), saved, strict=True):
            tensor.copy_(value)
    gradients = Buffers(parameters, "gradient")
    return Model(options.architecture, routers, parameters, weights, gradients, options.sequence_length)


def token_bytes(tokenizer: Tokenizer) -> np.ndarray[Any, np.dtype[np.int64]]:
    """UTF-8 length of every token in byte-level BPE (a character of the token's name is a byte); specials count 0."""
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    names = [tokenizer.id_to_token(number) or "" for number in range(tokenizer.get_vocab_size())]
    return np.array([0 if number in special else len(name) for number, name in enumerate(names)])


def windows_nll(model: Model, windows: np.ndarray[Any, Any], temperature: float) -> tuple[float, np.ndarray[Any, Any]]:
    """Sum of nats over all targets of [N, L + 1] windows, and the mean load of experts [layers, E]."""
    total, loads = 0.0, []
    for start in range(0, len(windows), BATCH):
        batch = torch.from_numpy(windows[start : start + BATCH])
        nll_T, load_LE = model.evaluate(batch[:, :-1], batch[:, 1:], temperature)
        total += float(nll_T.double().sum())
        loads.append(load_LE.numpy() * len(batch))
    return total, np.sum(loads, 0) / len(windows)


def odd_inputs(model: Model, tokenizer: Tokenizer, length: int, temperature: float) -> dict[str, dict[str, float]]:
    """For each odd text: nats per token and the largest share of its tokens that any one expert takes."""
    result = {}
    share_of_tokens = model.architecture.num_experts_per_tok
    for name, text in ODD_TEXTS.items():
        ids = tokenizer.encode(text).ids
        padded = np.resize(np.array(ids, dtype=np.int64), max(2, min(len(ids), length)) + 1)
        window = np.resize(padded, (1, length + 1))
        total, load_LE = windows_nll(model, window, temperature)
        result[name] = {
            "nll": round(total / length, 3),
            "largest_expert_share_ratio": round(float(load_LE.max()) * share_of_tokens, 3),
        }
    return result


def evaluate(run: Path, tokens: Path, num_windows: int, baseline_sequences: int) -> dict[str, Any]:
    """Everything the model card says about quality. The baseline sees the very sequences the model was trained on."""
    state = checkpoint.load(checkpoint.latest(run))
    options, shares = TrainOptions.from_json(json.loads(state["options"])), json.loads(state["shares"])
    model, temperature = load_model(state), options.router_temperature(state["step"])
    tokenizer = Tokenizer.from_file(str(tokens / "tokenizer.json"))
    sizes = token_bytes(tokenizer)
    paths = {domain: tokens / f"{domain}.train.u16" for domain in shares}
    sampler = Sampler(paths, shares, options.sequence_length, options.seed)
    count = min(state["sequence"], baseline_sequences)
    baseline = KneserNey(sampler.batch(0, count), options.architecture.vocab_size)
    domains, loads = {}, {}
    for domain in sorted(shares):
        windows = heldout_windows(tokens / f"{domain}.heldout.u16", options.sequence_length, num_windows)
        num_bytes = int(sizes[windows[:, 1:]].sum())
        total, load_LE = windows_nll(model, windows, temperature)
        ngram = sum(float(baseline.nll(window)[1:].sum()) for window in windows)
        loads[domain] = load_LE
        domains[domain] = {
            "tokens": int(windows[:, 1:].size),
            "bytes": num_bytes,
            "nll_per_token": round(total / windows[:, 1:].size, 4),
            "bits_per_byte": round(total / math.log(2) / num_bytes, 4),
            "ngram_bits_per_byte": round(ngram / math.log(2) / num_bytes, 4),
        }
    mixed_LE = sum(shares[domain] * load_LE for domain, load_LE in loads.items()) / sum(shares.values())
    return {
        "step": state["step"],
        "trained_tokens": state["sequence"] * options.sequence_length,
        "ngram_tokens": count * options.sequence_length,
        "domains": domains,
        "smallest_share_ratio": round(float(mixed_LE.min()) * mixed_LE.shape[1], 3),
        "odd_inputs": odd_inputs(model, tokenizer, options.sequence_length, temperature),
        "loads": {domain: np.round(load_LE, 5).tolist() for domain, load_LE in loads.items()},
    }


def draw_experts(loads: dict[str, list[list[float]]], destination: Path) -> None:
    """Heat map: load of every expert of every layer, one row a domain, in fair shares."""
    import matplotlib as mpl  # noqa: PLC0415  (an extra)

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    domains, first = list(loads), np.array(next(iter(loads.values())))
    figure, axes = pyplot.subplots(len(first), 1, figsize=(10, 1.1 * len(first) + 1), sharex=True, layout="constrained")
    for layer, axis in enumerate(axes):
        rows = np.array([loads[domain][layer] for domain in domains]) * first.shape[1]
        picture = axis.imshow(rows, aspect="auto", cmap="viridis", vmin=0, vmax=3)
        axis.set_yticks(range(len(domains)), domains, fontsize=6)
        axis.set_ylabel(f"layer {layer}", fontsize=7)
    axes[-1].set_xlabel("expert")
    figure.colorbar(picture, ax=axes, label="load in fair shares")
    figure.savefig(destination, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--windows", type=int, default=64, help="held-out windows a domain")
    parser.add_argument(
        "--baseline-sequences", type=int, default=1 << 40, help="the 5-grams' training sequences at most"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    result = evaluate(arguments.run, arguments.tokens, arguments.windows, arguments.baseline_sequences)
    arguments.destination.mkdir(parents=True, exist_ok=True)
    draw_experts(result["loads"], arguments.destination / "experts.png")
    (arguments.destination / "quality.json").write_text(json.dumps(result) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "loads"}, indent=1))


if __name__ == "__main__":
    main()
