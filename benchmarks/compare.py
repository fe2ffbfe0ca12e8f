"""Tidegate against llama.cpp: the same numbers, the same tokens, equal memory limits, interleaved runs.

    python benchmarks/compare.py run MODEL.gguf MODEL.store --out results/NAME.jsonl --case cap-1200MB --rounds 3
    python benchmarks/compare.py report results/NAME.jsonl

``run`` needs root: every child gets a memory control group of its own, the page cache is evicted before it starts, and the
disk's read-ahead is set to 128 KB for as long as it runs. Resident llama.cpp reads all weights first (its fastest mode);
under a limit it maps the file, which is what its users do then. ``report`` writes a table and a plot beside the runs.
Make the inputs with make_checkpoint.py and ``tidegate convert``; llama.cpp is started by ``--peer-python``. ``--own`` is a store
of the same numbers quantized again (``tidegate convert --experts int4 --dense int4``), which gets rows of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from cgroup import run_under_limit  # noqa: E402
from tidegate.checkpoint.store import ExpertStore  # noqa: E402
from tidegate.engine import bench  # noqa: E402
from tidegate.engine.codec import TextCodec  # noqa: E402
from tidegate.units import format_bytes, parse_bytes  # noqa: E402

READ_AHEAD_KB = 128
NO_LIMIT_BYTES = 1 << 40
OWN = "tidegate, own int4"
ENGINES = ("tidegate", OWN, "llama.cpp")


@dataclass(frozen=True)
class Case:
    """``limit_bytes`` 0: everything fits. ``busy``: a foreign process computes on core 0 all the time."""

    name: str
    limit_bytes: int
    prefill: int
    decode: int
    busy: bool = False


CASES = {
    case.name: case
    for case in (
        Case("resident", 0, 256, 64),
        Case("resident-1024", 0, 1024, 16),
        Case("resident-busy", 0, 256, 64, busy=True),
        Case("cap-2200MB", 2_200_000_000, 256, 64),
        Case("cap-1200MB", 1_200_000_000, 256, 64),
        Case("cap-1200MB-512", 1_200_000_000, 512, 16),
    )
}


def case_of(name: str) -> Case:
    """A case by name, or ``1600MB`` for a limit with a prompt of 256 and 64 decoded tokens."""
    return CASES[name] if name in CASES else Case(f"cap-{name}", parse_bytes(name, "--case"), 256, 64)


def evict(*paths: Path) -> None:
    """Drop the files from the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@contextmanager
def read_ahead(path: Path, kilobytes: int) -> Iterator[None]:
    """Set the read-ahead of the disk that holds ``path``; put back what it was."""
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    queue = block / "queue" if (block / "queue").is_dir() else block.parent / "queue"
    setting = queue / "read_ahead_kb"
    before = setting.read_text()
    setting.write_text(str(kilobytes))
    try:
        yield
    finally:
        setting.write_text(before)


@contextmanager
def foreign_work(wanted: bool) -> Iterator[None]:
    """A busy process on core 0."""
    if not wanted:
        yield
        return
    child = subprocess.Popen([sys.executable, "-c", "import os\nos.sched_setaffinity(0, {0})\nwhile True: pass"])
    try:
        yield
    finally:
        child.kill()
        child.wait()


def command(engine: str, case: Case, options: argparse.Namespace, tokens: Path, *, choices: bool) -> list[str]:
    sizes = [
        "--prefill",
        str(case.prefill),
        "--decode",
        str(options.decode or case.decode),
        "--threads",
        str(options.threads),
    ]
    if engine == "llama.cpp":
        mode = [] if case.limit_bytes else ["--no-mmap"]
        return [options.peer_python, str(HERE / "peer_llama_cpp.py"), str(options.gguf), str(tokens), *sizes, *mode]
    mode = ["--memory", f"{case.limit_bytes} B"] if case.limit_bytes else ["--warm"]
    mode += ["--choices"] if choices else []
    store = options.own if engine == OWN else options.store
    return [sys.executable, "-m", "tidegate", "bench", str(store), "--tokens", str(tokens), *sizes, *mode]


def run_once(engine: str, case: Case, options: argparse.Namespace, tokens: Path, *, choices: bool) -> dict[str, Any]:
    stores = [options.store, options.own] if options.own else [options.store]
    evict(options.gguf, *(path for store in stores for path in store.iterdir() if path.is_file()))
    with read_ahead(options.gguf, READ_AHEAD_KB), foreign_work(case.busy):
        start_s = time.perf_counter()
        done = run_under_limit(
            command(engine, case, options, tokens, choices=choices),
            case.limit_bytes or NO_LIMIT_BYTES,
            os.environ,
            timeout_s=1800,
        )
        wall_s = time.perf_counter() - start_s
    if done.returncode != 0:
        raise SystemExit(f"{engine} in {case.name}: exit code {done.returncode}, {done.oom_kills} kills\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "case": case.name,
        "limit_bytes": case.limit_bytes,
        "wall_s": round(wall_s, 2),
        "cgroup_peak_bytes": done.peak_bytes,
        **found,
        "engine": engine,
    }


def run(options: argparse.Namespace) -> None:
    store = ExpertStore.open(options.store)
    ids = TextCodec(store).encode(Path(bench.__file__).with_suffix(".txt").read_text(encoding="utf-8"))
    tokens = options.out.with_suffix(".tokens.json")
    tokens.parent.mkdir(parents=True, exist_ok=True)
    tokens.write_text(json.dumps(ids))
    where = {"commit": commit(), "machine": machine(), "date": time.strftime("%Y-%m-%d")}
    with options.out.open("a") as out:
        for number in range(options.rounds):
            order = ENGINES if number % 2 == 0 else ENGINES[::-1]
            for engine in order:
                if options.engine in (None, engine) and (engine != OWN or options.own):
                    row = run_once(engine, case_of(options.case), options, tokens, choices=options.choices)
                    print(f"{row['case']:16} {engine:18} prefill {row['prefill_tokens_per_s']:7.1f} tokens/s, "
                          f"decode {row['decode_tokens_per_s']:6.2f}", flush=True)  # fmt: skip
                    out.write(json.dumps(row | where) + "\n")
    tokens.unlink()


def commit() -> str:
    done = subprocess.run(
        ["git", "-C", HERE, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def machine() -> str:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), "")
    return f"{model or platform.processor()}, {os.cpu_count()} cores"


def report(options: argparse.Namespace) -> None:
    rows = [json.loads(line) for line in options.runs.read_text().splitlines()]
    groups: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row["case"]][row["engine"]].append(row)
    table = "\n".join([*table_lines(groups), "", *agreement_lines(groups)]) + "\n"
    options.runs.with_suffix(".md").write_text(table)
    print(table)
    plot(groups, options.runs.with_suffix(".png"))


Groups = dict[str, dict[str, list[dict[str, Any]]]]


def middle(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return median(values) if values else None


def table_lines(groups: Groups) -> list[str]:
    """Medians; the ratio is ours over theirs."""
    lines = [
        "| case | runs | prefill: Tidegate | llama.cpp | ratio | decode: Tidegate | llama.cpp | ratio | ceiling | of it "
        "| peak: Tidegate | llama.cpp |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    pairs = [(name, engines, engine) for name, engines in groups.items() for engine in (ENGINES[0], OWN)]
    for name, engines, engine in pairs:
        ours, theirs = engines.get(engine, []), engines.get("llama.cpp", [])
        if engine == OWN and not ours:
            continue
        name = f"{name}, own int4" if engine == OWN else name
        cells = [name, f"{len(ours)} / {len(theirs)}"]
        for phase in ("prefill", "decode"):
            a, b = (middle(rows, f"{phase}_tokens_per_s") for rows in (ours, theirs))
            cells += [number(a), number(b), f"{a / b:.2f}x" if a and b else ""]
        ceiling, ratio = middle(ours, "decode_ceiling_tokens_per_s"), middle(ours, "decode_of_ceiling_ratio")
        cells += [number(ceiling), f"{ratio:.0%}" if ratio else ""]
        cells += [format_bytes(int(middle(rows, "cgroup_peak_bytes") or 0)) for rows in (ours, theirs)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def agreement_lines(groups: Groups) -> list[str]:
    """How often both engines would have chosen the same next token, and how close our two best were where they differ."""
    lines = []
    for name, engines in groups.items():
        ours = next((row for row in engines.get("tidegate", []) if "greedy_token_ids" in row), None)
        theirs = next(iter(engines.get("llama.cpp", [])), None)
        if ours is None or theirs is None:
            continue
        pairs = list(zip(ours["greedy_token_ids"], theirs["greedy_token_ids"], ours["greedy_margins"], strict=False))
        margins = [margin for a, b, margin in pairs if a != b]
        text = f"{name}: {len(pairs) - len(margins)} of {len(pairs)} next tokens agree"
        if margins:
            usual = median(margin for *_, margin in pairs)
            differing = ", ".join(f"{m:.3f}" for m in margins)
            text += f"; where they differ our best two are {differing} apart in log probability (usually {usual:.2f})"
        lines.append(text)
    return lines


def plot(groups: Groups, path: Path) -> None:
    """Decoded tokens/s against the memory limit: both engines, and the ceiling of ours."""
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7, 4.2))
    series = [("tidegate", "decode_tokens_per_s", "Tidegate", "o-"), ("llama.cpp", "decode_tokens_per_s", "llama.cpp", "s-"),
              ("tidegate", "decode_ceiling_tokens_per_s", "ceiling for Tidegate's loads", "k:")]  # fmt: skip
    for engine, key, label, style in series:
        points = {}
        for engines in groups.values():
            rows = [row for row in engines.get(engine, []) if row["limit_bytes"] and row["case"].endswith("MB")]
            if rows:
                points[rows[0]["limit_bytes"] / 1e9] = middle(rows, key)
        axes.plot(*zip(*sorted(points.items()), strict=True) if points else ((), ()), style, label=label)
    axes.set(xlabel="memory limit of the whole process, GB", ylabel="decode, tokens/s", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    child = commands.add_parser("run")
    child.add_argument("gguf", type=Path)
    child.add_argument("store", type=Path)
    child.add_argument("--own", type=Path, help="a second store: the same numbers quantized again to the own int4")
    child.add_argument("--out", type=Path, required=True, help="runs are appended, one JSON object a line")
    child.add_argument("--case", default="resident", help=f"{', '.join(CASES)}, or a limit like 1600MB")
    child.add_argument("--rounds", type=int, default=1)
    child.add_argument("--decode", type=int, help="tokens to decode, instead of the case's number")
    child.add_argument("--engine", choices=ENGINES, help="only this one")
    child.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    child.add_argument("--choices", action="store_true", help="compare next tokens; ours decodes a little slower then")
    child.add_argument("--peer-python", default=sys.executable, help="a Python with llama-cpp-python")
    child.set_defaults(call=run)
    child = commands.add_parser("report")
    child.add_argument("runs", type=Path)
    child.set_defaults(call=report)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
