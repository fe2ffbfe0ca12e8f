"""The main job on a model made on the spot: a Mixture-of-Experts checkpoint answers inside a budget that cannot hold it,
with the same text as without the limit.

The model is random, so its text is noise; the path is the real one. Everything lies in a temporary folder.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from random_moe import make

import tidegate
from tidegate.units import format_bytes

PROMPT = "Weights flow, memory is a cache, the ledger is law."
ANSWER_TOKENS = 48
RESIDENT_RATIO = 0.4


def answer(store: Path, budget_bytes: int) -> tuple[str, dict]:
    """Greedy text and counters under a budget."""
    with tidegate.load(store, memory=budget_bytes, context=512) as model:
        completion = model.generate(PROMPT, max_tokens=ANSWER_TOKENS)
        return completion.text, model.stats()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tidegate-demo-") as folder:
        source, store = Path(folder) / "random-moe", Path(folder) / "random-moe.store"
        print("making a seeded random MoE (106 M weights; it talks noise)", flush=True)
        make(source, layers=8, experts=32, hidden=512, expert_width=256)
        command = [sys.executable, "-m", "tidegate"]
        subprocess.run([*command, "convert", str(source), str(store)], check=True)

        with tidegate.load(store, context=512) as model:
            plan = model.plan
            everything = plan.needs.largest_useful_bytes
            tight = plan.needs.budget_for(int(RESIDENT_RATIO * plan.needs.num_layers * plan.needs.num_experts))

        print(f"\n$ tidegate run STORE --memory {tight}B    ({RESIDENT_RATIO:.0%} of the experts fit)", flush=True)
        run = [*command, "run", str(store), PROMPT, "--memory", f"{tight}B", "--context", "512"]
        subprocess.run([*run, "--max-tokens", str(ANSWER_TOKENS)], check=True)

        limited_text, limited = answer(store, tight)
        free_text, _ = answer(store, everything)
        visits = limited["demand_hits"] + limited["misses"]
        print(
            f"\nagain through the Python interface: {limited['demand_hits']:,} of {visits:,} expert visits hit, "
            f"{format_bytes(limited['read_bytes'])} read"
        )
        same = limited_text == free_text
        print(
            f"text under {format_bytes(tight)} and under {format_bytes(everything)}: {'equal' if same else 'DIFFERENT'}"
        )
        if not same:
            raise SystemExit("the budget changed the answer: this is a bug, please report it")


if __name__ == "__main__":
    main()
