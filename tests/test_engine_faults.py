"""What goes wrong while a model runs: named errors, nothing left behind, and the engine goes on."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import fixed_process, load_model, num_threads, smallest_budget
from stores import VOCAB, qwen_config, write_store
from tidegate import _core
from tidegate.backends.base import Backend
from tidegate.backends.operands import Routing
from tidegate.checkpoint.manifest import DENSE_FILE, EXPERTS_FILE
from tidegate.checkpoint.store import ExpertStore
from tidegate.config import SamplingOptions
from tidegate.engine.dense import DenseSection
from tidegate.engine.engine import Engine
from tidegate.engine.kv_cache import KvCache
from tidegate.engine.scheduler import Scheduler
from tidegate.engine.sequence import Sequence
from tidegate.errors import CorruptFile, ReadFailed, TidegateError
from tidegate.experts.base import ExpertKey
from tidegate.experts.cache import ExpertCache
from tidegate.experts.loader import LoaderOptions, NativeLoader
from tidegate.experts.policy import policy_factory
from tidegate.models.decoder import Decoder
from tidegate.models.moe import Experts
from tidegate.models.weights import model_weights

__all__ = ["fixed_process"]
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("faults") / "store", qwen_config())


@pytest.fixture(scope="module")
def answer(store: Path) -> list[int]:
    with load_model(store) as model:
        return model.generate(PROMPT, max_tokens=10, ignore_eos=True).token_ids


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 60), st.booleans(), st.booleans())
def test_a_failed_read_is_named_and_the_next_answer_is_right(
    store: Path, answer: list[int], at: int, ends: bool, all_fit: bool
) -> None:
    reader = _core.FaultyReader(seed=at, max_delay_us=100, **{"end_at" if ends else "fail_at": at})
    memory = "1GiB" if all_fit else smallest_budget(store, io_threads=4)
    threads = num_threads()
    with load_model(store, reader, io_threads=4, memory=memory) as model:
        runtime = model._runtime
        try:
            first = model.generate(PROMPT, max_tokens=10, ignore_eos=True).token_ids
            assert first == answer, "the fault came later than the last read"
        except ReadFailed as error:
            assert error.path.name == EXPERTS_FILE and error.offset % 4096 == 0
            assert 0 <= error.got_bytes < error.wanted_bytes == runtime.plan.needs.slot_bytes
            assert ("Input/output error" in str(error)) != ends
        runtime.cache.check_integrity()
        assert runtime.engine.scheduler.is_idle
        assert runtime.engine.scheduler.kv.num_free == runtime.sizes.num_pages
        if not ends:
            assert model.generate(PROMPT, max_tokens=10, ignore_eos=True).token_ids == answer
    del runtime
    assert num_threads() <= threads  # an earlier model may have lost its last ones meanwhile


def test_a_short_read_is_read_on(store: Path, answer: list[int]) -> None:
    with load_model(store, _core.FaultyReader(short_at=5)) as model:
        assert model.generate(PROMPT, max_tokens=10, ignore_eos=True).token_ids == answer


def test_only_the_sequences_of_the_failed_step_end(store: Path, answer: list[int]) -> None:
    with load_model(store, _core.FaultyReader(fail_at=0), sequences=1) as model, pytest.raises(ReadFailed):
        model.generate([PROMPT, PROMPT], max_tokens=10, ignore_eos=True)
    with load_model(store, _core.FaultyReader(fail_at=0), sequences=1) as model:
        sequences = [model._sequence(PROMPT, SamplingOptions(max_tokens=10, ignore_eos=True)) for _ in range(2)]
        with pytest.raises(ReadFailed):
            model._finish(sequences)
        assert [s.finish_reason for s in sequences] == ["error", "length"]
        assert sequences[1].output_ids == answer


def test_a_stream_that_is_closed_early_gives_its_pages_back(store: Path) -> None:
    with load_model(store) as model:
        stream = model.stream("hello", max_tokens=50)
        next(stream)
        stream.close()
        scheduler = model._runtime.engine.scheduler
        assert scheduler.is_idle and scheduler.kv.num_free == scheduler.kv.num_pages


def _damaged(store: Path, folder: Path, name: str, change: object) -> Path:
    folder.mkdir()
    for file in store.iterdir():
        data = file.read_bytes()
        (folder / file.name).write_bytes(change(data) if file.name == name else data)  # type: ignore[operator]
    return folder


def _flip(at: int) -> object:
    return lambda data: data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def test_a_flipped_byte_in_a_blob_is_found_by_verify(store: Path, tmp_path: Path) -> None:
    blob = ExpertStore.open(store).blob(ExpertKey(1, 3))
    damaged = _damaged(store, tmp_path / "bad", EXPERTS_FILE, _flip(blob.offset + 100))
    with (
        load_model(damaged, verify=True) as model,
        pytest.raises(CorruptFile, match="expert 3 of MoE layer 1") as caught,
    ):
        model.generate([list(range(i, i + 50)) for i in range(0, 200, 25)], max_tokens=1)
    assert caught.value.offset == blob.offset and caught.value.path == damaged / EXPERTS_FILE
    with load_model(damaged) as model:
        model.generate(PROMPT, max_tokens=2)


def test_a_flipped_byte_in_the_dense_weights_is_found_by_verify(store: Path, tmp_path: Path) -> None:
    entry = ExpertStore.open(store).dense["layers.1.qkv"]
    damaged = _damaged(store, tmp_path / "bad", DENSE_FILE, _flip(entry.offset + 7))
    threads = num_threads()
    with pytest.raises(CorruptFile, match=r"layers\.1\.qkv") as caught:
        load_model(damaged, verify=True)
    assert (
        caught.value.offset == entry.offset and num_threads() <= threads
    )  # an earlier model may have lost some meanwhile
    load_model(damaged).close()


@pytest.mark.parametrize("name", [EXPERTS_FILE, DENSE_FILE, "tokenizer.json"])
@pytest.mark.parametrize("keep", [lambda n: n - 1, lambda n: n // 2, lambda n: 0])
def test_a_truncated_file_is_refused_before_it_is_read(store: Path, tmp_path: Path, name: str, keep: object) -> None:
    damaged = _damaged(store, tmp_path / "bad", name, lambda data: data[: keep(len(data))])  # type: ignore[operator]
    with pytest.raises(TidegateError, match=name):
        load_model(damaged)


class _ChecksumBackend(Backend[np.ndarray]):
    """Computes nothing, routes at random, and checks every expert's bytes at the moment when they would be computed."""

    def __init__(self, store: ExpertStore, seed: int) -> None:
        self._store, self._random = store, np.random.default_rng(seed)
        self._layer, self.checked = 0, 0

    def bind_kv(self, layout, pages) -> None: ...

    def begin(self, batch) -> None:
        self._batch, self._layer = batch, 0

    def mark(self) -> int:
        return 0

    def release(self, mark) -> None: ...

    def embed(self, table, multiplier):
        return np.zeros((len(self._batch.token_ids_T), 1), np.float32)

    def norm(self, x, norm):
        return x

    def linear(self, x, weight):
        return x

    def rank(self, scores, experts_per_token, width):
        return [], []

    def attend(self, qkv, weights):
        return qkv

    def attend_latent(self, q, kv, weights):
        return q

    def route(self, x, router):
        config = router.config
        ids = [self._random.permutation(config.num_experts)[: config.num_experts_per_tok] for _ in x]
        return Routing(np.array(ids, np.int32), np.ones((len(x), config.num_experts_per_tok), np.float32))

    def moe(self, x, routing, layout, placements, slots, activation):
        for placement in placements:
            for expert, slot in zip(placement.experts, placement.slots, strict=True):
                wanted = self._store.blob(ExpertKey(self._layer, expert)).crc32
                assert _core.crc32(slots.wait(slot)) == wanted, (self._layer, expert, slot)
                self.checked += 1
        self._layer += 1
        return x

    def gated_mlp(self, x, gate_up, down, activation):
        return x

    def add(self, x, y, scale=1.0):
        return x

    def add_gated(self, x, y, gate_input, gate):
        return x

    def logits(self, x, norm, head, divisor):
        return np.zeros((len(self._batch.logit_rows_R), VOCAB), np.float32)


def test_every_slot_is_right_at_the_moment_of_compute_in_10_000_steps(tmp_path: Path) -> None:
    config = qwen_config(num_hidden_layers=2, num_experts=12, num_experts_per_tok=3, max_position_embeddings=16384)
    store, layers, top_k, steps = ExpertStore.open(write_store(tmp_path / "store", config)), 2, 3, 10_000
    size = store.layouts[0].blob_bytes
    memory = np.zeros(layers * top_k * size + 4096, np.uint8)
    memory = memory[-memory.ctypes.data % 4096 :]
    views = [memory[i * size : (i + 1) * size] for i in range(layers * top_k)]
    reader = _core.FaultyReader(seed=7, max_delay_us=150)
    loader = NativeLoader(store, views, LoaderOptions(threads=8, chunk_bytes=4096), reader)
    cache = ExpertCache([top_k] * layers, 12, policy_factory("lru"), loader)
    backend = _ChecksumBackend(store, seed=3)
    dense = np.fromfile(store.dense_path, np.uint8)
    weights = model_weights(config, DenseSection(store, dense), steps + 1)
    decoder = Decoder(config, weights, backend, Experts(cache, loader, store.layouts))
    scheduler = Scheduler(KvCache(700, 16), max_running=1, prefill_chunk=8, max_logit_rows=1)
    engine = Engine(decoder, scheduler, recount=cache.check_integrity)
    sequence = Sequence(0, [1], steps, SamplingOptions(ignore_eos=True))
    scheduler.add(sequence)
    guess = random.Random(5)
    while sequence.finish_reason is None:
        engine.step()
        if guess.random() < 0.3:  # wrong guesses, cancelled and evicted in flight
            cache.prefetch(guess.randrange(layers), guess.randrange(12), 1e9)
    loader.close()
    cache.check_integrity()
    assert sequence.finish_reason == "length" and sequence.error is None
    assert backend.checked == steps * layers * top_k
    assert cache.counters.misses > steps * layers and cache.counters.prefetch_issued > 1000
