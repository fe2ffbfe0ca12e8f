"""Every predictor against one contract; fitted ones against what they were fitted to."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stores import qwen_config, write_store
from tidegate.checkpoint.store import ExpertStore
from tidegate.errors import CorruptFile, UsageError
from tidegate.experts.policy import POLICIES
from tidegate.experts.predictor import Calibration
from tidegate.experts.predictor_class import SemanticMlp
from tidegate.experts.predictor_file import PREDICTORS, find_predictor, kind_of, load_predictor, save_predictor
from tidegate.experts.predictor_networks import LayerMlp, WindowMlp
from tidegate.quant.pack import unpack
from tidegate.sim import fit_networks, semantic
from tidegate.sim.fit import fit_predictor
from tidegate.sim.groups import grouped
from tidegate.sim.rows import Rows, decayed_before, last_before, window_before
from tidegate.sim.score import score_predictor
from tidegate.sim.semantic import find_classes
from tidegate.sim.token_table import count_tokens

LAYERS, EXPERTS, TOP = 4, 8, 2
SMALL = {
    "mlp": {"most_tokens": 400, "epochs": 100},
    "semantic": {"most_tokens": 400, "epochs": 100, "vector_VS": np.random.default_rng(2).standard_normal((24, 6))},
    "lstm": {"most_tokens": 400, "epochs": 60},
    "window-mlp": {"most_tokens": 200, "epochs": 10},
}
FITTED = [kind for kind in PREDICTORS if kind != "next-gate"]


def routing(seed: int = 0, sequences: int = 8, length: int = 60) -> Rows:
    """Layer 0 follows the token, each later layer the one before it, and every sequence has favourites."""
    rng = np.random.default_rng(seed)
    total = sequences * length
    token_T = rng.integers(0, 20, total).astype(np.int32)
    experts = np.zeros((total, LAYERS, TOP), np.uint8)
    for t in range(total):
        first = token_T[t] % EXPERTS
        favourite = t // length % EXPERTS
        for layer in range(LAYERS):
            second = favourite if rng.random() < 0.7 else int(rng.integers(EXPERTS))
            experts[t, layer] = first, second if second != first else (first + 1) % EXPERTS
            first = (first + 3) % EXPERTS
    offsets = np.arange(0, total + 1, length)
    return Rows(list(range(sequences)), offsets, token_T, experts, np.empty((total, LAYERS, 0)), EXPERTS)


@pytest.fixture(scope="module")
def fitted():
    """Kind -> predictor, fitted to the first sequences of ``routing()``."""
    rows = routing().part(0, 6)
    out = {kind: fit_predictor(kind, rows, **SMALL.get(kind, {})) for kind in FITTED}
    sketch = np.random.default_rng(1).standard_normal((len(rows.token_T), LAYERS, 6)).astype(np.float32)
    out["next-gate"] = fit_networks.fit_next_gate(sketch, rows.hot(), 1)
    return out


steps = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 25)), min_size=1, max_size=4),
    min_size=1,
    max_size=6,
)


def _run(predictor, script, seed):
    rng = np.random.default_rng(seed)
    said = []
    for rows in script:
        predictor.begin_step([sequence for sequence, _ in rows], [token for _, token in rows])
        for layer in range(LAYERS):
            said.append(np.array(predictor.predict(layer)))
            predictor.observe_sketch(layer, rng.standard_normal((len(rows), 6)).astype(np.float32))
            ids = np.array([rng.permutation(EXPERTS)[:TOP] for _ in rows])
            predictor.observe(layer, ids)
            said.append(np.array(predictor.predict((layer + 1) % LAYERS)))
            said.append(np.array(predictor.predict((layer + 2) % LAYERS)))
    return np.array(said)


@pytest.mark.parametrize("kind", PREDICTORS)
@settings(max_examples=15, deadline=None)
@given(script=steps, seed=st.integers(0, 1000))
def test_probabilities_for_every_expert_and_the_same_for_the_same_calls(fitted, tmp_path_factory, kind, script, seed):
    path = tmp_path_factory.mktemp("p") / "p.npz"
    save_predictor(path, fitted[kind])
    one, other = load_predictor(path), load_predictor(path)
    said = _run(one, script, seed)
    assert said.shape[1:] == (EXPERTS,) and np.isfinite(said).all()
    assert said.min() >= 0 and said.max() <= 1
    np.testing.assert_array_equal(said, _run(other, script, seed))


@pytest.mark.parametrize("kind", FITTED)
def test_more_rows_never_make_a_use_less_probable(fitted, tmp_path, kind):
    save_predictor(tmp_path / "p.npz", fitted[kind])
    alone, together = load_predictor(tmp_path / "p.npz"), load_predictor(tmp_path / "p.npz")
    alone.begin_step([1], [3])
    together.begin_step([1, 2], [3, 4])
    assert (together.predict(0) >= alone.predict(0) - 1e-6).all()


@pytest.mark.parametrize("kind", FITTED)
def test_rows_told_together_are_rows_told_one_by_one(fitted, tmp_path, kind):
    save_predictor(tmp_path / "p.npz", fitted[kind])
    one, other = load_predictor(tmp_path / "p.npz"), load_predictor(tmp_path / "p.npz")
    rng = np.random.default_rng(2)
    for length in (3, 1, 70, 5):
        ids = rng.permuted(np.tile(np.arange(EXPERTS), (length, LAYERS, 1)), axis=2)[..., :TOP].astype(np.uint8)
        tokens = rng.integers(0, 25, length).tolist()
        for row in range(length):
            one.begin_step([7], tokens[row : row + 1])
            for layer in range(LAYERS):
                one.observe(layer, ids[row : row + 1, layer])
        other.begin_step([7] * length, tokens)
        for layer in range(LAYERS):
            other.observe(layer, ids[:, layer])
        for layer in range(LAYERS):
            np.testing.assert_allclose(one.predict(layer), other.predict(layer), atol=1e-4)
    for predictor in (one, other):
        predictor.begin_step([7], [4])
    np.testing.assert_allclose(one.predict(0), other.predict(0), atol=1e-4)


def test_who_has_not_been_seen_for_longest_is_forgotten_first(fitted):
    predictor = find_predictor("decayed", LAYERS, EXPERTS).load()
    predictor.most_sequences = 2
    for sequences in ([1, 2], [3, 1], [1, 4], [5, 1]):
        predictor.begin_step(sequences, [0] * len(sequences))
        predictor.observe(0, np.array([[1, 2]] * len(sequences)))
    assert list(predictor._histories) == [5, 1]
    assert predictor._histories[1].seen_L[0] == 4 and predictor._histories[5].seen_L[0] == 1


def test_no_torch_is_imported_to_use_or_fit_them() -> None:
    code = (
        "import sys, tidegate.experts.predictor_file, tidegate.experts.foreseer, tidegate.sim.fit, tidegate.sim.simulate;"
        "assert not {'torch', 'scipy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_learns_what_it_can_see(fitted):
    held_out = routing(seed=5, sequences=3)
    scores = {kind: score_predictor(fitted[kind], held_out, POLICIES["lru"], 3, most_tokens=150) for kind in FITTED}
    chance = TOP / EXPERTS
    for kind, score in scores.items():
        # Fitted to seven sequences, nobody can know another's favourites; every kind sees at least one of the two causes.
        floor = chance * (0.95 if kind == "groups" else 1.2)
        assert score.recall[TOP] > floor, (kind, score.recall)
        assert score.recall[TOP] == pytest.approx(score.precision), "K guesses and K truths"
        assert 0 <= score.calibration_error < 0.25 and score.tokens == 150
    assert scores["mlp"].recall[TOP] > scores["decayed"].recall[TOP]
    assert scores["markov"].recall[TOP] > scores["last-token"].recall[TOP]
    assert scores["decayed"].miss_recall[TOP] < scores["mlp"].miss_recall[TOP]


def test_next_gate_finds_a_linear_router():
    rng = np.random.default_rng(4)
    hidden = rng.standard_normal((800, LAYERS, 12)).astype(np.float32)
    gates = rng.standard_normal((LAYERS, EXPERTS, 12)).astype(np.float32)
    for layer in range(1, LAYERS):
        hidden[:, layer] = 0.95 * hidden[:, layer - 1] + 0.2 * hidden[:, layer]
    ids = np.argsort(-np.einsum("tls,les->tle", hidden, gates), axis=2)[..., :TOP]
    hot = np.zeros((800, LAYERS, EXPERTS), np.uint8)
    np.put_along_axis(hot, ids, 1, axis=2)
    for start in (None, gates * 0.1):
        predictor = fit_networks.fit_next_gate(hidden[:600], hot[:600], 1, gates_LES=start)
        found = 0
        for t in range(600, 800):
            predictor.begin_step([0], [0])
            for layer in range(LAYERS - 1):
                predictor.observe_sketch(layer, hidden[t : t + 1, layer])
                found += len(set(np.argsort(-predictor.predict(layer + 1))[:TOP]) & set(ids[t, layer + 1]))
        assert found / (200 * (LAYERS - 1) * TOP) > 0.75


def test_training_features_are_the_features_of_inference(fitted):
    rows = routing(sequences=2, length=30)
    hot, first = rows.hot(), rows.is_first
    last, heat = last_before(hot, first), decayed_before(hot, first, 2 ** (-1 / 16))
    slow, window = decayed_before(hot, first, 2 ** (-1 / 128)), window_before(hot, first, 64)
    mlp, tiny = fitted["mlp"], fitted["window-mlp"]
    assert isinstance(mlp, LayerMlp) and isinstance(tiny, WindowMlp)
    for t in range(60):
        for predictor in (mlp, tiny):
            predictor.begin_step([100 + t // 30], [int(rows.token_T[t])])
        for layer in range(LAYERS):
            (history,) = mlp._rows
            blocks = mlp.features(history, layer).reshape(-1, EXPERTS)
            for back in range(3):
                wanted = hot[t, layer - 1 - back] if layer - 1 - back >= 0 else 0
                np.testing.assert_array_equal(blocks[back], wanted * np.ones(EXPERTS))
            np.testing.assert_array_equal(blocks[3], last[t, layer])
            np.testing.assert_allclose(blocks[4], heat[t, layer], atol=1e-3)
            (history,) = tiny._rows
            columns = np.stack([last, window, heat, slow], axis=3)[t, layer]
            np.testing.assert_allclose(tiny.features(history, layer), columns, atol=1e-3)
            for predictor in (mlp, tiny):
                predictor.observe(layer, rows.experts_TLK[t : t + 1, layer])


def test_texts_of_different_words_are_of_different_classes_in_fitting_and_in_use(tmp_path):
    rows = routing(sequences=12, length=40)
    kind_T = np.arange(len(rows.token_T)) // 40 % 2
    rows = replace(rows, token_T=(rows.token_T % 10 + 10 * kind_T).astype(np.int32))
    vectors = np.random.default_rng(0).standard_normal((20, 4)) * 0.3
    vectors[:10, 0] += 1
    vectors[10:, 0] -= 1
    classes = find_classes(rows, vectors, seed=1)
    by_class = [np.bincount(classes.class_T[kind_T == kind], minlength=len(classes.centroid_CS)) for kind in (0, 1)]
    assert np.minimum(*by_class).sum() <= 0.05 * len(kind_T)
    predictor = fit_predictor("semantic", rows, vector_VS=vectors, most_tokens=200, epochs=1)
    assert isinstance(predictor, SemanticMlp)
    for t in range(80):
        predictor.begin_step([int(t // 40)], [int(rows.token_T[t])])
        (history,) = predictor._rows
        mean = vectors[rows.token_T[max(t // 40 * 40, t - 31) : t + 1]].mean(axis=0)
        nearest = np.argmin(((predictor.centroid_CS - mean) ** 2).sum(axis=1))
        assert predictor._class_of[history] == nearest
        wanted = predictor.class_CLE[nearest, 2].astype(np.float32)
        np.testing.assert_array_equal(predictor.features(history, 2)[-EXPERTS:], wanted)
    with pytest.raises(UsageError, match="--embedding"):
        fit_predictor("semantic", rows)


@pytest.mark.parametrize("dense", ["int8-g32", "f32"])
def test_vectors_of_tokens_keep_who_is_near_whom(tmp_path, monkeypatch, dense):
    monkeypatch.setattr(semantic, "_BLOCK_ROWS", 64)
    store = ExpertStore.open(write_store(tmp_path / "store", qwen_config(), dense=dense))
    vectors = semantic.token_vectors(store).astype(np.float32)
    config, entry = store.config, store.dense["embed"]
    packed = np.fromfile(store.dense_path, np.uint8, entry.nbytes, offset=entry.offset)
    embedding = unpack(packed, entry.fmt, config.vocab_size, config.hidden_size)
    embedding -= embedding.mean(axis=0)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    assert vectors.shape == (config.vocab_size, min(16, config.hidden_size))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-2)
    upper = np.triu_indices(config.vocab_size, 1)
    assert np.corrcoef((vectors @ vectors.T)[upper], (embedding @ embedding.T)[upper])[0, 1] > 0.35


def test_a_row_does_not_see_its_own_use_in_the_table():
    rows = routing(sequences=2, length=30)
    table, hot = count_tokens(rows), rows.hot()
    entries = table.without_itself(rows.token_T, hot)
    token = table.tokens[0]
    seen = np.flatnonzero(rows.token_T == token)
    others = hot[seen[1:]].sum(axis=0)
    wanted = (others + 8 * table.prior_LE) / (len(seen) - 1 + 8)
    np.testing.assert_allclose(entries[seen[0]], wanted, rtol=1e-5)


def test_lstm_gradients_are_those_of_finite_differences():
    rng = np.random.default_rng(0)
    size, batch = 3, 5
    weights = {
        "wx": rng.standard_normal((2, 4, 4 * size)), "wh": rng.standard_normal((2, size, 4 * size)),
        "b": rng.standard_normal((2, 4 * size)), "wo": rng.standard_normal((2, size, 4)), "bo": rng.standard_normal((2, 4)),
    }  # fmt: skip
    inputs = [rng.integers(0, 2, (2, batch, 4)).astype(float) for _ in range(4)]
    inside = [(rng.integers(0, 4, batch) <= i)[None, :, None] for i in range(4)]
    truth = rng.integers(0, 2, (2, batch, 4)).astype(float)

    def loss() -> float:
        hidden = cell = np.zeros((2, batch, size))
        for x, ok in zip(inputs, inside, strict=True):
            gates = x @ weights["wx"] + hidden @ weights["wh"] + weights["b"][:, None]
            i, f, o, g = np.split(gates, 4, axis=2)
            i, f, o = (1 / (1 + np.exp(-v)) for v in (i, f, o))
            cell = np.where(ok, f * cell + i * np.tanh(g), 0)
            hidden = np.where(ok, o * np.tanh(cell), 0)
        logit = hidden @ weights["wo"] + weights["bo"][:, None]
        return float((np.logaddexp(0, logit) - truth * logit).sum() / batch)

    grads = fit_networks._lstm_gradients(inputs, inside, truth, weights)
    for name, values in weights.items():
        for _ in range(4):
            at = tuple(int(rng.integers(n)) for n in values.shape)
            kept, step = values[at], 1e-5
            values[at] = kept + step
            high = loss()
            values[at] = kept - step
            low = loss()
            values[at] = kept
            assert grads[name][at] == pytest.approx((high - low) / (2 * step), rel=2e-3, abs=1e-5), (name, at)


def test_calibration_rises_and_matches_frequencies():
    rng = np.random.default_rng(0)
    score = rng.random(20_000)
    curve = Calibration.fit(score, rng.random(20_000) < score**2)
    assert (np.diff(curve.frequencies) >= 0).all()
    np.testing.assert_allclose(curve(np.array([0.2, 0.5, 0.9], np.float32)), [0.04, 0.25, 0.81], atol=0.05)
    flat = Calibration.fit(np.zeros(10), np.ones(10))
    assert flat(np.array([0.3], np.float32)) == 1.0


def test_groups_are_the_planted_ones():
    pairs = np.full((1, 6, 6), 5.0)
    for members in ((0, 3), (1, 4), (2, 5)):
        pairs[0][np.ix_(members, members)] = 60
    np.fill_diagonal(pairs[0], 100)
    (group,) = grouped(pairs, 3)
    assert group[0] == group[3] and group[1] == group[4] and group[2] == group[5] and len(set(group)) == 3


def test_names_and_files_that_cannot_be_used_are_named(fitted, tmp_path):
    assert kind_of(find_predictor("decayed", LAYERS, EXPERTS).load()) == "decayed"
    with pytest.raises(UsageError, match="fitted first"):
        find_predictor("mlp", LAYERS, EXPERTS)
    with pytest.raises(UsageError, match="no such file"):
        find_predictor(str(tmp_path / "none.npz"), LAYERS, EXPERTS)
    path = tmp_path / "p.npz"
    save_predictor(path, fitted["markov"])
    with pytest.raises(UsageError, match="was fitted to 4 layers of 8 experts, not 24 of 32"):
        find_predictor(str(path), 24, 32)
    data = path.read_bytes()
    for broken in (b"", data[:100], data[:-40], b"x" * 50):
        path.write_bytes(broken)
        with pytest.raises(CorruptFile, match="not a predictor"):
            load_predictor(Path(path))
