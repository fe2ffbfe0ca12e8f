"""Next tokens of Tidegate and of llama.cpp on a trained model: the built-in one as a GGUF file that both read.

    python benchmarks/agreement.py FOLDER --peer-python PYTHON

FOLDER gets the Hugging Face form, the GGUF file (experts Q4_0, the other matrices Q8_0, routers and norms float32) and
``agreement.json``. Teacher-forced windows of the held-out texts, every place of which counts; a window begins without
context. The third opinion is the same file in Tidegate's reference backend, with float32 arithmetic.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from safetensors import safe_open  # noqa: E402

import tidegate  # noqa: E402
from gguf_convert import metadata, rename  # noqa: E402
from gguf_files import quantized, write_gguf  # noqa: E402
from tidegate.terminal import table  # noqa: E402
from tidegate.train.compact import unpack  # noqa: E402

MODEL = HERE.parent / "models" / "builtin"
WINDOW = 256
EXACT_WINDOWS = 6  # the reference takes its time


def write_model(folder: Path) -> Path:
    """The GGUF file, made once."""
    path = folder / "builtin.gguf"
    if not path.exists():
        unpack(MODEL / "model-int4.safetensors", folder / "hf")
        config = json.loads((folder / "hf" / "config.json").read_text())
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        with safe_open(folder / "hf" / "model.safetensors", "pt") as file:
            weights = {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118
        about = {**metadata(config, "qwen3moe", True), "tokenizer.ggml.model": "no_vocab"}
        named = rename(weights, config, gguf.MODEL_ARCH.QWEN3MOE, True, True)
        write_gguf(path, "qwen3moe", about, {name: _stored(name, w) for name, w in named})
    return path


def _stored(name: str, weight: np.ndarray) -> Any:
    if weight.ndim == 1 or "gate_inp" in name:
        return weight
    return quantized(weight, "Q4_0" if "_exps" in name else "Q8_0")


def windows() -> list[list[int]]:
    """Token ids, WINDOW each."""
    out = []
    with tidegate.load("builtin", memory="1GiB") as model:
        for text in sorted((MODEL / "heldout").glob("*.txt")):
            ids = model.encode(text.read_text(encoding="utf-8"))
            out += [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)]
    return out


def choices(path: Path, texts: list[list[int]], backend: str) -> list[np.ndarray]:
    """The best token behind every place, and how far it is ahead of the second, [WINDOW, 2] each."""
    out = []
    with tidegate.load(path, memory="2GiB", context=WINDOW, backend=backend) as model:
        for ids in texts:
            logits = model.logits(ids)
            second, best = np.sort(logits, axis=1)[:, -2:].T
            out.append(np.stack([logits.argmax(axis=1), best - second], axis=1))
    return out


def peer_choices(path: Path, texts: list[list[int]], folder: Path, python: str) -> list[np.ndarray]:
    """llama.cpp's, [WINDOW] each."""
    out = []
    for ids in texts:
        (folder / "tokens.json").write_text(json.dumps(ids))
        command = [python, str(HERE / "peer_llama_cpp.py"), str(path), str(folder / "tokens.json")]
        command += ["--prefill", "1", "--decode", str(len(ids) - 1), "--no-mmap"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        out.append(np.array(json.loads(done.stdout.splitlines()[-1])["greedy_token_ids"]))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer-python", required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    path, texts = write_model(args.folder), windows()
    ours, peer = choices(path, texts, "cpu"), peer_choices(path, texts, args.folder, args.peer_python)
    some = slice(None, None, len(texts) // EXACT_WINDOWS)
    exact = choices(path, texts[some], "reference")
    pairs = {
        "Tidegate, llama.cpp": _agree([one[:, 0] for one in ours], peer),
        "Tidegate, float32": _agree([one[:, 0] for one in ours[some]], [one[:, 0] for one in exact]),
        "llama.cpp, float32": _agree(peer[some], [one[:, 0] for one in exact]),
    }
    differ = [one[:, 0] != other for one, other in zip(ours, peer, strict=True)]
    ahead = [float(np.median(np.concatenate([one[where, 1] for one, where in zip(ours, which, strict=True)])))
             for which in (differ, [~one for one in differ])]  # fmt: skip
    print(table(["pair", "places", "same"], [[name, f"{n:,}", f"{same:.1%}"] for name, (n, same) in pairs.items()]))
    print(
        f"Tidegate's best token is ahead of its second by {ahead[0]:.2f} where they differ, by {ahead[1]:.2f} elsewhere"
    )
    found = {name: {"places": n, "same_ratio": same} for name, (n, same) in pairs.items()}
    (args.folder / "agreement.json").write_text(
        json.dumps({**found, "ahead_where_different": ahead[0]}, indent=1) + "\n"
    )


def _agree(one: list[np.ndarray], other: list[np.ndarray]) -> tuple[int, float]:
    a, b = np.concatenate(one), np.concatenate(other)
    return len(a), float((a == b).mean())


if __name__ == "__main__":
    main()
