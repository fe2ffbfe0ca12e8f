"""Short runs of every way to train a router, on a small model: one table for docs/router-training.md.

Usage: python benchmarks/router_options.py TOKENS WORK [--steps N]. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tidegate.train import checkpoint
from tidegate.train.evaluate import load_model, odd_inputs
from tidegate.train.options import Architecture, RouterOptions, TrainOptions
from tidegate.train.trainer import Trainer

SMALL = Architecture(
    hidden_size=64, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=32,
    num_experts=16, num_experts_per_tok=2, expert_size=32, max_positions=128,
)  # fmt: skip
TAIL_STEPS = 50
VARIANTS = {
    "no balancing": RouterOptions(balance_alpha=0.0, z_loss=0.0),
    "balance loss 0.01, f per batch": RouterOptions(balance_alpha=0.01, z_loss=0.0),
    "balance loss 0.01, f over a window": RouterOptions(balance_alpha=0.01, z_loss=0.0, balance_scope="window"),
    "balance loss 0.03, f per batch": RouterOptions(balance_alpha=0.03, z_loss=0.0),
    "balance loss 0.01 + z-loss 0.001": RouterOptions(),
    "bias 0.002, no loss": RouterOptions(balance_alpha=0.0, z_loss=0.0, bias_rate=0.002),
    "balance loss 0.01, capacity 1.25, overflow": RouterOptions(balance_alpha=0.01, z_loss=0.0, capacity_factor=1.25),
    "balance loss 0.01, temperature 1.0 to 0.5": RouterOptions(balance_alpha=0.01, z_loss=0.0, temperature_end=0.5),
    "balance loss 0.01, orthogonal init": RouterOptions(balance_alpha=0.01, z_loss=0.0, init="orthogonal"),
    "balance loss 0.01, centered input": RouterOptions(balance_alpha=0.01, z_loss=0.0, input="centered"),
    "balance loss 0.01, standard input": RouterOptions(balance_alpha=0.01, z_loss=0.0, input="standard"),
}


def measure(name: str, router: RouterOptions, tokens: Path, work: Path, steps: int, seed: int) -> dict[str, Any]:
    """Train one variant; quality and balance over the last steps."""
    options = TrainOptions(
        architecture=SMALL, router=router, steps=steps, batch_sequences=16, sequence_length=64, warmup_steps=20,
        decay_steps=steps // 4, world_size=1, compile=False, seed=seed,
    )  # fmt: skip
    folder = work / f"{list(VARIANTS).index(name)}-{seed}"
    trainer = Trainer(folder, tokens, options)
    trainer.run()
    records = checkpoint.read_curve(folder / "curve.jsonl")
    tail = records[-TAIL_STEPS:]
    load_LE = trainer.shared.load_WLE.mean(0).numpy()
    model = load_model(checkpoint.load(checkpoint.latest(folder)))
    tokenizer = Tokenizer.from_file(str(tokens / "tokenizer.json"))
    odd = odd_inputs(model, tokenizer, options.sequence_length, options.router_temperature(steps))
    return {
        "option": name,
        "seed": seed,
        "training_nll": round(float(np.mean([record["nll"] for record in tail])), 4),
        "heldout_nll": round(float(np.mean(list(records[-1]["heldout"].values()))), 4),
        "expert_entropy_ratio": round(float(np.mean([record["expert_entropy_ratio"] for record in tail])), 4),
        "smallest_share_ratio": round(float(np.mean([record["smallest_share_ratio"] for record in tail])), 3),
        "largest_share_ratio": round(float(load_LE.max()) * load_LE.shape[1], 2),
        "odd_largest_share_ratio": {text: row["largest_expert_share_ratio"] for text, row in odd.items()},
        "tokens_per_s": round(float(np.median([record["tokens_per_s"] for record in tail]))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", help="only the options whose name holds one of these texts, split at |")
    arguments = parser.parse_args()
    rows = []
    columns = ["training_nll", "heldout_nll", "expert_entropy_ratio", "smallest_share_ratio", "largest_share_ratio",
               "odd_largest_share_ratio"]  # fmt: skip
    wanted = arguments.only.split("|") if arguments.only else [""]
    variants = {name: router for name, router in VARIANTS.items() if any(part in name for part in wanted)}
    print("| option | seed | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 2) + "|", flush=True)
    for seed in range(arguments.seeds):
        for name, router in variants.items():
            row = measure(name, router, arguments.tokens, arguments.work, arguments.steps, seed)
            print(f"| {name} | {seed} | " + " | ".join(f"{row[column]}" for column in columns) + " |", flush=True)
            rows.append(row)
    print(json.dumps({"steps": arguments.steps, "rows": rows}))


if __name__ == "__main__":
    main()
