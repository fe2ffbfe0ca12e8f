"""How far the forecast is off: 27 points (shape, bits, share resident, sequences) measured, and the table in docs/planner.md.

    python benchmarks/forecast.py FOLDER                      everything: stores, traces, measurements, table; 10 minutes
    python benchmarks/forecast.py FOLDER --points 'qwen3-*'   these points; the table is printed only
    python benchmarks/forecast.py FOLDER --table              write the table from what was measured

Run `tidegate hardware FOLDER/olmoe-int4` first, both on an idle machine. Stores have random weights at real widths, few layers,
about 0.7 to 2.7 GB each. A point's hit rate comes from replaying a trace of the same model on other prompts.

Every point runs three times, in turns with the others; its median counts. A run during which others computed, or before or after
which memory was not read as fast as when the machine was measured, is repeated and does not count. Results are kept in
FOLDER/runs.jsonl; measuring everything starts it anew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from tidegate import _core
from tidegate.backends.operands import ByteArray
from tidegate.checkpoint.inventory import dense_tensors
from tidegate.checkpoint.manifest import DENSE_FILE, EXPERTS_FILE, MANIFEST, Manifest, lay_out, to_json
from tidegate.checkpoint.reading import read_into
from tidegate.checkpoint.store import ExpertStore
from tidegate.config import EngineOptions, parse_options
from tidegate.memory.budget import Budget
from tidegate.models.families import model_config
from tidegate.planner.card import Card, expected_process, make_card
from tidegate.planner.headers import ModelHeaders
from tidegate.planner.machine import Machine, load_machine
from tidegate.planner.measure import OtherWork, probe_memory
from tidegate.planner.measure_kernels import Kernels
from tidegate.quant.formats import Format
from tidegate.quant.native import pack

SHAPES = {  # hidden, expert width, experts, per token, layers, heads, KV heads
    "qwen3": (2048, 768, 128, 8, 4, 32, 4),
    "olmoe": (2048, 1024, 64, 8, 6, 16, 16),
    "mixtral": (4096, 7168, 8, 2, 3, 32, 8),
}
SHARES, VOCAB, PROMPT, ANSWER = (0.25, 0.5, 1.0), 4096, 64, 32
REPEATS, MOST_TRIES, MOST_BUSY_RATIO, MOST_MEMORY_OFF, PATIENCE_S = 3, 6, 0.05, 0.1, 600.0
PROBE_BYTES, WORKSPACE_BYTES = 256 << 20, 1 << 20
RUNS = "runs.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "planner.md"
BEGIN, END = "<!-- forecast table: made by benchmarks/forecast.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Point:
    shape: str
    bits: str
    share: float
    sequences: int

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.bits}-{self.share:.2f}-{self.sequences}"


POINTS = [
    *(Point(shape, bits, share, 1) for shape in SHAPES for bits in ("int4", "int8") for share in SHARES),
    *(Point(shape, "int4", share, 4) for shape in SHAPES for share in SHARES),
]


def make_store(folder: Path, shape: str, bits: str) -> Path:
    """Random weights; the experts of a layer share their rows in different orders."""
    path = folder / f"{shape}-{bits}"
    if path.exists():
        return path
    partial = folder / f"{shape}-{bits}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    hidden, width, experts, top, layers, heads, kv_heads = SHAPES[shape]
    config = model_config(
        {
            "model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128, "num_experts": experts,
            "num_experts_per_tok": top, "moe_intermediate_size": width, "max_position_embeddings": 4096,
            "norm_topk_prob": True,
        }
    )  # fmt: skip
    fmt, rng = Format(bits, 32), np.random.default_rng(zlib.crc32(path.name.encode()))
    formats = {tensor.name: Format("int8", 32) for tensor in dense_tensors(config) if tensor.is_matrix}
    entries, expert_layers = lay_out(config, formats, [(fmt, fmt)] * layers)
    with (partial / DENSE_FILE).open("wb") as file:
        done = []
        for entry in entries:
            scale = 1.0 if entry.name == "embed" or len(entry.shape) == 1 else entry.shape[-1] ** -0.5
            values = rng.standard_normal(entry.shape, np.float32) * np.float32(scale)
            values = np.ones(entry.shape, np.float32) if "norm" in entry.name else values
            data = (pack(values, entry.fmt) if entry.fmt else values).tobytes()
            file.write(bytes(entry.offset - file.tell()) + data)
            done.append(replace(entry, crc32=zlib.crc32(data)))
        file.write(bytes(-file.tell() % 4096))
    layout = expert_layers[0].layout
    up = pack(rng.standard_normal((width, hidden), np.float32) * np.float32(hidden**-0.5), fmt).reshape(width // 16, -1)
    down = pack(rng.standard_normal((hidden, width), np.float32) * np.float32(width**-0.5), fmt).reshape(
        hidden // 16, -1
    )
    with (partial / EXPERTS_FILE).open("wb") as file:
        done_layers = []
        for layer in expert_layers:
            crcs = []
            for _ in range(layer.num_experts):
                blob = np.zeros(layout.blob_bytes, np.uint8)
                for offset, panels in ((0, up), (layout.up_offset, up), (layout.down_offset, down)):
                    blob[offset : offset + panels.size] = panels[rng.permutation(len(panels))].reshape(-1)
                blob.tofile(file)
                crcs.append(zlib.crc32(blob.data))
            done_layers.append(replace(layer, crc32s=tuple(crcs)))
    special: dict[str, object] = {"bos_token": None, "eos_token": None, "eos_token_ids": [], "add_bos": False}
    manifest = Manifest(config, tuple(done), tuple(done_layers), {}, special, {"name": path.name}, {})
    (partial / MANIFEST).write_text(to_json(manifest))
    return partial.rename(path)


CHILD = """
import json, sys
from contextlib import nullcontext
from pathlib import Path
import numpy as np
from tidegate import load
from tidegate.config import SamplingOptions
from tidegate.engine.sequence import Sequence
store, memory, count, seed, trace, prompt, answer, vocab = json.loads(sys.argv[1])
rng, sampling = np.random.default_rng(seed), SamplingOptions(ignore_eos=True)
with load(store, memory=memory, context=prompt + answer, sequences=count, prefill_chunk=prompt) as model:
    engine = model.runtime.engine
    running = [Sequence(n + 1, rng.integers(0, vocab, prompt).tolist(), answer, sampling) for n in range(count)]
    with model.trace(Path(trace)) if trace else nullcontext():
        for sequence in running:
            engine.scheduler.add(sequence)
        before = model.stats()
        while any(sequence.finish_reason is None for sequence in running):
            if not engine.times.decode_tokens:
                before = model.stats()
            for sequence in engine.step():  # whatever the model chose, it reads on with a random token
                sequence.tokens[-1] = int(rng.integers(vocab))
    after = model.stats()
    print(json.dumps(after | {"decode_" + key: after[key] - before[key] for key in before}))
"""


def run(store: Path, memory: int, sequences: int, seed: int, trace: Path | None = None) -> dict[str, float]:
    asked = [str(store), memory, sequences, seed, str(trace or ""), PROMPT, ANSWER, VOCAB]
    done = subprocess.run([sys.executable, "-c", CHILD, json.dumps(asked)], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def headers_of(store: Path) -> ModelHeaders:
    opened = ExpertStore.open(store)
    return ModelHeaders(str(store), "store", opened.config, opened.dense, opened.manifest.layers, None, None)


def budget_for(headers: ModelHeaders, options: EngineOptions, share: float, machine: Machine) -> int:
    """That holds the share of the experts."""
    card = make_card(headers, options, Budget(1 << 40, ""), machine, machine.threads)
    needs = replace(card.needs, runtime_bytes=expected_process(machine, headers.config.vocab_size).rss_bytes)
    return needs.budget_for(round(share * needs.num_layers * needs.num_experts)) + (1 << 20)


def card_of(folder: Path, point: Point) -> tuple[Path, Card]:
    """The store and what is forecast for the point; records the trace if there is none."""
    store = make_store(folder, point.shape, point.bits)
    machine, headers = load_machine(store), headers_of(store)
    asked = {"context": PROMPT + ANSWER, "sequences": point.sequences, "prefill_chunk": PROMPT}
    options = parse_options(EngineOptions, asked)
    trace = folder / f"{point.shape}-{point.bits}-{point.sequences}.trace"
    if not trace.exists():
        run(store, budget_for(headers, options, 1.0, machine), point.sequences, 1, trace)
    budget = Budget(budget_for(headers, options, point.share, machine), "by the benchmark")
    card = make_card(headers, options, budget, machine, machine.threads, prompt_tokens=PROMPT, trace=trace)
    return store, card


class Quiet:
    """Whether the machine is as it was when it was measured."""

    def __init__(self, machine: Machine, memory: ByteArray) -> None:
        self._expected = machine.memory_bytes_per_s(machine.threads)
        compute = _core.Compute(machine.threads, memory[:WORKSPACE_BYTES], _core.available_isas()[0])
        self._kernels = Kernels(memory[WORKSPACE_BYTES:], compute)
        self._others, self._before = OtherWork(), 1.0

    def begin(self) -> None:
        self._before, self._others = self._memory_ratio(), OtherWork()

    def end(self) -> tuple[bool, str]:
        """Since ``begin``; and in words."""
        busy, ratios = self._others.ratio(), (self._before, self._memory_ratio())
        off = max(abs(ratio - 1) for ratio in ratios)
        said = f"others {busy:.0%}, memory {ratios[0]:.0%} and {ratios[1]:.0%} of the measured rate"
        return busy <= MOST_BUSY_RATIO and off <= MOST_MEMORY_OFF, said

    def _memory_ratio(self) -> float:
        return self._kernels.reads() / self._expected


def measure(folder: Path, points: list[Point], memory: ByteArray) -> None:
    """Rounds over all points until each has its quiet runs, tries run out, or patience does."""
    for store in sorted({card_of(folder, point)[0] for point in points}):
        read_once(store, memory)
    quiet, started_s, good, tries = Quiet(load_machine(folder), memory), time.monotonic(), dict.fromkeys(points, 0), 0
    while (left := [point for point in points if good[point] < REPEATS]) and tries < MOST_TRIES:
        tries += 1
        for point in left:
            if tries > 1 and time.monotonic() - started_s > PATIENCE_S:
                return
            store, card = card_of(folder, point)
            quiet.begin()
            found = run(store, card.budget.limit_bytes, point.sequences, 2)
            is_quiet, said = quiet.end()
            good[point] += is_quiet
            visits = found["decode_demand_hits"] + found["decode_prefetch_hits"] + found["decode_misses"]
            kept = {
                "name": point.name,
                "is_quiet": is_quiet,
                "decode_tokens_per_s": found["decode_tokens"] / found["decode_s"],
                "prefill_tokens_per_s": point.sequences * PROMPT / found["prefill_s"],
                "hit_ratio": 1 - found["decode_misses"] / visits,
                "read_bytes_per_token": found["decode_read_bytes"] / found["decode_tokens"],
            }
            with (folder / RUNS).open("a") as file:
                file.write(json.dumps(kept) + "\n")
                os.fsync(file.fileno())
            print(f"{kept}; {said}", flush=True)


def read_once(store: Path, memory: ByteArray) -> None:
    """Whatever caches lie below the file system have seen every store alike."""
    file = store / EXPERTS_FILE
    for offset in range(0, file.stat().st_size - memory.size, memory.size):
        read_into(file, offset, memory, page_cache=False)


def results(folder: Path) -> dict[str, dict[str, float]]:
    """Medians of every point's quiet runs, or of all if it has none; ``quiet`` counts them."""
    file = folder / RUNS
    runs = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    out = {}
    for name in {one["name"] for one in runs}:
        own = [one for one in runs if one["name"] == name]
        quiet = [one for one in own if one["is_quiet"]]
        medians = {
            key: statistics.median(one[key] for one in quiet or own)
            for key in own[0]
            if key not in ("name", "is_quiet")
        }
        out[name] = {**medians, "quiet": len(quiet)}
    return out


def table(folder: Path, points: list[Point]) -> Iterator[str]:
    """The forecasts are made anew, with the rates that are known now."""
    measured, rows, errors, noisy = results(folder), [], [], 0
    for point in points:
        if point.name not in measured:
            continue
        found, real = card_of(folder, point)[1].forecast, measured[point.name]
        assert found is not None
        off, prompt_off = (
            expected / real[name] - 1
            for expected, name in (
                (found.decode_tokens_per_s, "decode_tokens_per_s"),
                (found.prefill_tokens_per_s, "prefill_tokens_per_s"),
            )
        )
        errors.append((abs(off), abs(prompt_off)))
        noisy += not real["quiet"]
        rows.append(
            f"| {point.shape} | {point.bits} | {point.share:.0%} | {point.sequences} | {found.hits.expected:.0%} | "
            f"{real['hit_ratio']:.0%} | {found.decode_tokens_per_s:.1f} | {real['decode_tokens_per_s']:.1f} | {off:+.0%} | "
            f"{found.step.binding} | {found.prefill_tokens_per_s:.0f} | {real['prefill_tokens_per_s']:.0f} | {prompt_off:+.0%} |"
        )
    for what, found_errors in (("Decode", [one for one, _ in errors]), ("Prompts", [other for _, other in errors])):
        found_errors.sort()
        ninth = found_errors[min(len(found_errors) - 1, int(0.9 * len(found_errors)))]
        median = statistics.median(found_errors)
        yield f"{what}: {len(found_errors)} points, median error {median:.0%}, 90th percentile {ninth:.0%}."
    if noisy:
        yield f"No quiet moment was found for {noisy} of them."
    yield (
        f"Tokens/s of all sequences together; prompts of {PROMPT} tokens that start together, from a cold start; answers of "
        f"{ANSWER}. Medians of {REPEATS} runs. Measured hits include prefetched ones."
    )
    yield ""
    yield (
        "| shape | bits | resident | sequences | hits | measured "
        "| decode forecast | measured | error | binds | prompt forecast | measured | error |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|---:|"
    yield from rows


def write_table(folder: Path) -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    lines = "\n".join(table(folder, POINTS))
    PAGE.write_text(f"{before}{BEGIN}\n{lines}\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--points", nargs="*", help="names or patterns, like 'qwen3-int4-*'; the table is printed only")
    parser.add_argument("--prepare", action="store_true", help="make the stores and traces and nothing else")
    parser.add_argument("--table", action="store_true", help="write the table and nothing else")
    args = parser.parse_args()
    chosen = [one for one in POINTS if any(fnmatch(one.name, pattern) for pattern in args.points or ["*"])]
    if args.prepare:
        for point in chosen:
            print(card_of(args.folder, point)[0], flush=True)
        return
    if not args.table:
        if args.points is None:
            (args.folder / RUNS).unlink(missing_ok=True)
        with probe_memory(PROBE_BYTES) as memory:
            measure(args.folder, chosen, memory)
    if args.points is None:
        write_table(args.folder)
    else:
        print("\n".join(table(args.folder, chosen)))


if __name__ == "__main__":
    main()
