"""The main job on the built-in model: it writes in each of its domains inside a budget that cannot hold its experts, and the
text is the same as without the limit.
"""

from __future__ import annotations

import sys

import tidegate
from tidegate.cli.report import closing_line, plan_table
from tidegate.engine.model import Model
from tidegate.units import format_bytes

RESIDENT_RATIO = 0.4
CONTEXT, PREFILL_CHUNK, ANSWER_TOKENS = 512, 64, 60
SAMPLING = {"temperature": 0.6, "top_p": 0.9, "seed": 1}
PROMPTS = {
    "prose": "It was a bright morning in May, and Miss Bennet",
    "manuals": "To install the package on your system, first",
    "code": "def read_lines(path):\n    ",
    "Chinese": "在对话框中",
    "classical Chinese": "春風",
    "instructions": "What does the noun “harbor” mean?",
}


def load(memory: str | int | None = None) -> Model:
    return tidegate.load("builtin", memory=memory, context=CONTEXT, prefill_chunk=PREFILL_CHUNK)


def budget(resident_ratio: float) -> int:
    """Bytes in which this share of all experts has a slot; what the process takes for itself grew with what it did."""
    with load() as model:
        needs = model.plan.needs
    return needs.budget_for(round(resident_ratio * needs.num_layers * needs.num_experts))


def answers(model: Model, max_tokens: int, show: bool) -> dict[str, str]:
    """The text of every domain, shown while it is written."""
    texts = {}
    for domain, prompt in PROMPTS.items():
        is_question = domain == "instructions"
        ids = model.chat_prompt([{"role": "user", "content": prompt}]) if is_question else model.encode(prompt)
        if show:
            print(f"\n[{domain}] {prompt}", end="\n" if is_question else "", flush=True)
        pieces = []
        for piece in model.stream(ids, max_tokens=max_tokens, **SAMPLING):
            pieces.append(piece)
            if show:
                print(piece, end="", flush=True)
        if show:
            print()
        texts[domain] = "".join(pieces)
    return texts


def main() -> None:
    with load() as model:
        answers(model, 2, show=False)
        facts = model.plan.needs
    print(
        f"the built-in model: 29 million weights, {facts.num_layers} layers of {facts.num_experts} experts; a toy that writes "
        f"and knows little.\n{RESIDENT_RATIO:.0%} of its experts fit in the budget, the others are read from disk when they are "
        "needed.\n"
    )
    tight = budget(RESIDENT_RATIO)
    with load(tight) as model:
        print(plan_table(model.plan, f"{format_bytes(tight)} for the whole process"), flush=True)
        limited = answers(model, ANSWER_TOKENS, show=True)
        print(f"\nin {format_bytes(tight)}: {closing_line(model.stats())}", flush=True)
    everything = budget(1.0)
    with load(everything) as model:
        free = answers(model, ANSWER_TOKENS, show=False)
        print(f"in {format_bytes(everything)}: {closing_line(model.stats())}")
    different = [domain for domain in PROMPTS if limited[domain] != free[domain]]
    if different:
        sys.exit(f"the budget changed the text of {', '.join(different)}: this is a bug, please report it")
    print("check: all texts are the same in both budgets")


if __name__ == "__main__":
    main()
