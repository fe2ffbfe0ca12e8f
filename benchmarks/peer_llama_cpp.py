"""Runs llama.cpp (through llama-cpp-python's C API) on teacher-forced tokens and prints one JSON line.

    python benchmarks/peer_llama_cpp.py MODEL.gguf TOKENS.json --prefill 256 --decode 64 [--no-mmap]

TOKENS.json is a list of token ids. ``--no-mmap`` lets llama.cpp repack its weights (its fastest resident mode); with mmap
it runs from the page cache, which is what people use when a model does not fit. Install with
`CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AMX_TILE=OFF
-DGGML_AMX_INT8=OFF" pip install llama-cpp-python` in an environment of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import time
from pathlib import Path

import llama_cpp
import numpy as np


def evaluate(ctx, tokens: list[int], position: int, vocab: int, batch) -> int:
    """Run tokens at ``position``...; returns the greedy choice after the last one."""
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index] = token
        batch.pos[index] = position + index
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = 0
        batch.logits[index] = index == len(tokens) - 1
    if llama_cpp.llama_decode(ctx, batch) != 0:
        raise SystemExit("llama_decode failed")
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx, len(tokens) - 1), (vocab,))
    return int(logits.argmax())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("--prefill", type=int, default=256)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-mmap", action="store_true")
    args = parser.parse_args()
    tokens = json.loads(args.tokens.read_text())[: args.prefill + args.decode]

    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    start_s = time.perf_counter()
    model_params = llama_cpp.llama_model_default_params()
    model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE if args.no_mmap else llama_cpp.LLAMA_LOAD_MODE_MMAP
    # Repacked weights are a second copy beside the map, in memory that cannot be dropped: killed under a limit.
    model_params.use_extra_bufts = args.no_mmap
    model = llama_cpp.llama_model_load_from_file(str(args.model).encode(), model_params)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = len(tokens) + 8
    params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = args.threads
    ctx = llama_cpp.llama_init_from_model(model, params)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(512, 0, 1)
    load_s = time.perf_counter() - start_s

    choices, position = [], 0
    start_s = time.perf_counter()
    while position < args.prefill:
        piece = tokens[position : min(position + 512, args.prefill)]
        choice = evaluate(ctx, piece, position, vocab, batch)
        position += len(piece)
    prefill_s = time.perf_counter() - start_s
    choices.append(choice)
    step_s = []
    for token in tokens[args.prefill :]:
        start_s = time.perf_counter()
        choices.append(evaluate(ctx, [token], position, vocab, batch))
        step_s.append(time.perf_counter() - start_s)
        position += 1
    print(
        json.dumps(
            {
                "engine": "llama.cpp",
                "version": llama_cpp.__version__,
                "load_s": load_s,
                "prefill_tokens_per_s": args.prefill / prefill_s,
                "decode_tokens_per_s": len(step_s) / sum(step_s),
                "decode_median_tokens_per_s": 1 / float(np.median(step_s)),
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "greedy_token_ids": choices,
            }
        )
    )


if __name__ == "__main__":
    main()
