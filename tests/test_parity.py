"""The decoder against transformers: float32 logits of a 40-token prefill and 24 decode steps, every family, every backend.

The error of a comparison is max |a - b| / max |b| over all logits.
"""

import functools
import json
import shutil

import numpy as np
import pytest
import torch

import checkpoints
from in_memory import BACKENDS, WORKSPACE_BYTES, TinyModel, aligned, tiny_model
from tidegate.backends.cpu import CpuBackend
from tidegate.backends.reference import ReferenceBackend
from tidegate.quant.formats import Format

PREFILL, DECODE = 40, 24
TOLERANCE = 2e-4
BF16 = Format("bf16")


def token_ids(count: int = PREFILL + DECODE, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 250, count).astype(np.int32)


@functools.cache
def oracle(name: str, dtype: str = "float32", seed: int = 3) -> np.ndarray:
    """transformers' logits of the test tokens, float32 [T, V]."""
    with torch.no_grad():
        logits = checkpoints.load(name, dtype)(torch.tensor(token_ids(seed=seed))[None].long()).logits
    return logits[0].numpy()


def prefill_and_decode(model: TinyModel, ids: np.ndarray, sequence: int = 0) -> np.ndarray:
    rows = model.run([(sequence, ids[:PREFILL])])
    for i in range(PREFILL, len(ids)):
        rows += model.run([(sequence, ids[i : i + 1])])
    return np.concatenate(rows)


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", checkpoints.FAMILIES)
def test_float32_logits_agree_with_transformers(name, backend):
    model = tiny_model(checkpoints.checkpoint(name), BACKENDS[backend])
    assert error(prefill_and_decode(model, token_ids()), oracle(name)) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", checkpoints.FAMILIES)
def test_bf16_weights_lose_nothing_of_a_bf16_checkpoint(name, backend):
    model = tiny_model(checkpoints.checkpoint(name, "bfloat16"), BACKENDS[backend], experts=BF16, dense=BF16)
    assert error(prefill_and_decode(model, token_ids()), oracle(name, "bfloat16")) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "qwen3"])
def test_f16_kv_pages_stay_within_float16_rounding(name, backend):
    model = tiny_model(checkpoints.checkpoint(name), BACKENDS[backend], kv_dtype="f16")
    assert error(prefill_and_decode(model, token_ids()), oracle(name)) < 5e-3


@pytest.mark.parametrize("name", ["olmoe", "olmoe_norm", "qwen2_moe", "qwen3_moe"])
def test_the_other_norm_topk_prob_contract_gives_other_logits(name, tmp_path):
    """So the agreement above is not luck."""
    folder = tmp_path / name
    shutil.copytree(checkpoints.checkpoint(name), folder)
    config = json.loads((folder / "config.json").read_text())
    config["norm_topk_prob"] = not config["norm_topk_prob"]
    (folder / "config.json").write_text(json.dumps(config))
    assert error(prefill_and_decode(tiny_model(folder, ReferenceBackend), token_ids()), oracle(name)) > 0.05


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "experts", [Format.parse(name) for name in ("f32", "int4-g32", "int8-g32", "int4-g32-min", "int4-g32-m8")], ids=str
)
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v2", "gpt_oss", "phimoe"])
def test_chunks_batches_and_slots_change_no_bit(name, experts, backend):
    """Whole prefill alone = ragged chunks beside other sequences with fewer slots than a step needs."""
    dense = Format("int8", 32) if experts.is_integer else experts
    ids, others = token_ids(), [token_ids(30, seed) for seed in (8, 9)]
    folder = checkpoints.checkpoint(name)
    wanted = prefill_and_decode(tiny_model(folder, BACKENDS[backend], experts=experts, dense=dense), ids)

    model = tiny_model(folder, BACKENDS[backend], experts=experts, dense=dense, capacity=3)
    rows, at = [], 0
    for step, size in enumerate((1, 7, 16, 3, 11, 1, 1, 24)):
        mates = [(1 + i, other[step * 3 : step * 3 + 1 + i]) for i, other in enumerate(others)]
        chunks = [*mates[:1], (0, ids[at : at + size]), *mates[1:]]
        rows.append(model.run(chunks)[1])
        at += size
    assert at == len(ids)
    assert np.array_equal(np.concatenate(rows), wanted)


@pytest.mark.parametrize("name", checkpoints.FAMILIES)
def test_integer_weights_give_the_reference_and_the_cpu_the_same_model(name):
    """Sums of integers agree to the bit; a norm that differs in the last place can still round an activation the other way."""
    formats = {"experts": Format("int4", 32), "dense": Format("int8", 32)}
    folder, ids = checkpoints.checkpoint(name), token_ids()
    cpu, reference = (prefill_and_decode(tiny_model(folder, BACKENDS[b], **formats), ids) for b in ("cpu", "reference"))
    assert error(cpu, reference) < 0.1
    assert np.median(np.abs(cpu - reference)) / np.abs(reference).max() < 1e-3


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", checkpoints.FAMILIES)
def test_threads_change_no_bit(name, threads):
    formats = {"experts": Format("int4", 64), "dense": Format("bf16")}
    folder, ids = checkpoints.checkpoint(name), token_ids(17)
    wanted = tiny_model(folder, BACKENDS["cpu"], **formats).run([(0, ids)])[0]
    model = tiny_model(folder, lambda: CpuBackend(threads, aligned(WORKSPACE_BYTES)), **formats, capacity=4)
    assert np.array_equal(model.run([(0, ids)])[0], wanted)


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_an_expert_is_loaded_once_a_step_and_layer(capacity):
    """Expert-major: a prefill loads what it needs once, however many slots there are."""
    model = tiny_model(checkpoints.checkpoint("olmoe"), ReferenceBackend, capacity=capacity)
    model.run([(0, token_ids(PREFILL))])
    assert model.memory is not None and len(model.memory.loads) == len(set(model.memory.loads)) > 40
    model.decoder.experts.cache.check_integrity()
