"""The decoder around the expert cache: failed loads, retries, recorded routing, loads before shared experts."""

import numpy as np
import pytest

import checkpoints
from attention_cases import cpu_backend
from in_memory import TinyModel, tiny_model
from test_parity import token_ids
from tidegate.backends.reference import ReferenceBackend
from tidegate.errors import ReadFailed
from tidegate.experts.cache import ExpertCache
from tidegate.experts.policy import DecayedLfu
from tidegate.experts.trace import TraceMeta, TraceReader, TraceWriter
from tidegate.quant.formats import Format


def model(name: str = "qwen2_moe", **options: object) -> TinyModel:
    return tiny_model(checkpoints.checkpoint(name), ReferenceBackend, **options)


@pytest.mark.parametrize("capacity", [2, 5, 12])
@pytest.mark.parametrize("fail_at", [0, 3, 11])
def test_a_failed_load_leaves_a_consistent_cache_and_the_step_can_be_tried_again(capacity, fail_at, monkeypatch):
    ids = token_ids()
    wanted = model().run([(0, ids[:20])])[0]
    broken = model(capacity=capacity)
    waits, wait = 0, broken.memory.wait

    def failing(slot):
        nonlocal waits
        waits += 1
        if waits == fail_at + 1:
            raise ReadFailed("experts.bin", 4096, 100, 7, "Input/output error")
        return wait(slot)

    monkeypatch.setattr(broken.memory, "wait", failing)
    with pytest.raises(ReadFailed, match="Input/output error"):
        broken.run([(0, ids[:20])])
    cache = broken.decoder.experts.cache
    cache.check_integrity()
    assert not any(cache.book(layer).pinned() for layer in range(cache.num_layers))
    assert np.array_equal(broken.run([(0, ids[:20])])[0], wanted)


@pytest.mark.parametrize("capacity", [None, 6])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_whole_layers_are_the_blocks_one_by_one(name, capacity, tmp_path, monkeypatch):
    """Prompts and single tokens of two sequences. Blocks of a model that somebody watches go the Python way. Where a layer needs
    more experts than it has slots, the layers before it are run whole."""
    whole, single = (
        tiny_model(checkpoints.checkpoint(name), cpu_backend, experts=Format.parse("int8-g32"), capacity=capacity)
        for _ in "ab"
    )
    loaders = [tiny.read_natively(tmp_path) for tiny in (whole, single)]
    single.decoder.experts.trace = Watcher()
    halves, run = [], whole.decoder.backend.run_layers

    def counted(*args):
        done = run(*args)
        halves.append(done[0])
        return done

    monkeypatch.setattr(whole.decoder.backend, "run_layers", counted)
    ids, num_halves = token_ids(40), 2 * whole.config.num_layers
    steps = (
        [[(0, [token])] for token in ids[:8]]
        + [[(1, ids[8:20])]]
        + [[(0, [a]), (1, [b])] for a, b in zip(ids[20:30], ids[30:], strict=True)]
    )
    for step in steps:
        for got, wanted in zip(whole.run(step), single.run(step), strict=True):
            assert np.array_equal(got, wanted)
    assert len(halves) == len(steps) and halves[0] == num_halves
    assert (min(halves) < num_halves) == (capacity is not None)
    assert whole.decoder.experts.cache.counters == single.decoder.experts.cache.counters
    for loader in loaders:
        loader.close()


def test_whole_layers_are_those_of_the_cache_in_use(tmp_path):
    tiny, ids = tiny_model(checkpoints.checkpoint("qwen3_moe"), cpu_backend), token_ids(12)
    loader = tiny.read_natively(tmp_path)
    wanted = [tiny.run([(0, [token])])[0] for token in ids]
    experts, count = tiny.decoder.experts, tiny.config.moe.num_experts
    experts.cache = ExpertCache([count // 2] * tiny.config.num_layers, count, DecayedLfu, loader)
    assert all(np.array_equal(tiny.run([(1, [token])])[0], row) for token, row in zip(ids, wanted, strict=True))
    assert experts.cache.counters.misses > 0
    loader.close()


def test_a_load_that_fails_in_whole_layers_is_the_loaders_error(tmp_path):
    tiny, ids = tiny_model(checkpoints.checkpoint("qwen3_moe"), cpu_backend, capacity=6), token_ids(2)
    wanted = tiny.run([(0, ids)])[0]
    loader = tiny.read_natively(tmp_path)
    path = tmp_path / "experts.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:4096])
    with pytest.raises(ReadFailed, match=r"experts\.bin"):
        tiny.run([(1, ids)])
    cache = tiny.decoder.experts.cache
    cache.check_integrity()
    assert not any(cache.book(layer).pinned() for layer in range(cache.num_layers))
    path.write_bytes(whole)
    assert np.array_equal(tiny.run([(1, ids)])[0], wanted)
    loader.close()


@pytest.mark.parametrize(
    ("name", "natively", "watched"),
    [("qwen3_moe", False, False), ("deepseek_v2_lite", True, False), ("qwen3_moe", True, True)],
)
def test_layers_are_not_run_whole_where_they_cannot_be_or_somebody_watches(
    name, natively, watched, tmp_path, monkeypatch
):
    tiny = tiny_model(checkpoints.checkpoint(name), cpu_backend)
    loader = tiny.read_natively(tmp_path) if natively else None
    tiny.decoder.experts.trace = Watcher() if watched else None
    calls = []
    monkeypatch.setattr(tiny.decoder.backend, "run_layers", lambda *args: calls.append(args) or (0, -1))
    tiny.run([(0, token_ids(3))])
    assert not calls
    if loader is not None:
        loader.close()


class Watcher:
    """Of routing, and of nothing else."""

    wants_hidden = wants_guesses = False

    def record(self, *_: object) -> None:
        pass


def test_routing_is_recorded_layer_by_layer(tmp_path):
    tiny = model("qwen3_moe")
    config, experts = tiny.config, tiny.decoder.experts
    meta = TraceMeta(config.num_moe_layers, config.moe.num_experts, config.moe.num_experts_per_tok)
    experts.trace = TraceWriter(tmp_path / "trace.npz", meta)
    ids = token_ids(12)
    for chunk in (ids[:9], ids[9:10], ids[10:]):
        rows = np.zeros(len(chunk), np.int32)
        experts.trace.begin_step(rows, rows, chunk)
        tiny.run([(0, chunk)])
        experts.trace.end_step()
    experts.trace.close()
    reader = TraceReader(tmp_path / "trace.npz")
    [recorded] = list(reader)
    reader.close()
    assert recorded.experts.shape == (12, 3, 4) and recorded.step.tolist() == [0] * 9 + [1] + [2] * 2
    np.testing.assert_allclose(recorded.weights.astype(np.float32).sum(axis=2), 1, atol=2e-3)  # norm_topk_prob
    loaded = {(layer, int(e)) for layer in range(3) for e in np.unique(recorded.experts[:, layer])}
    assert loaded == {(key.layer, key.expert) for key in tiny.memory.loads}


def test_loads_are_on_their_way_while_the_shared_expert_is_computed(monkeypatch):
    tiny = model("deepseek_v2_lite")
    events = []
    backend, memory = tiny.decoder.backend, tiny.memory
    for owner, name in ((memory, "load"), (memory, "wait"), (backend, "gated_mlp")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, call=call, name=name, **k: (events.append(name), call(*a, **k))[1])
    tiny.run([(0, token_ids(1))])
    routed = tiny.config.moe.num_experts_per_tok
    layer = ["load"] * routed + ["gated_mlp"] + ["wait"] * routed
    assert events == ["gated_mlp", *layer, *layer]  # the first layer is dense


def test_logits_are_given_for_the_rows_asked_for():
    whole = model("mixtral").run([(0, token_ids(10))])[0]
    tiny = model("mixtral")
    forward = tiny.decoder.forward
    rows = np.array([9, 2], np.int32)
    tiny.decoder.forward = lambda batch: forward(type(batch)(**{**vars(batch), "logit_rows_R": rows}))
    assert np.array_equal(np.concatenate(tiny.run([(0, token_ids(10))]))[:2], whole[rows])
