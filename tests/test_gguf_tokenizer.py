"""Tokenizers built from GGUF metadata agree with where they came from: transformers, `tokenizers`, sentencepiece."""

import io
import json

import pytest
import sentencepiece
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_files import embedding, llama_metadata, write_gguf
from smollm2 import gguf_path as smollm2_gguf
from tidegate.checkpoint.base import kind_of_tokenizer
from tidegate.checkpoint.gguf import GgufCheckpoint
from tidegate.checkpoint.gguf_cuts import CUTS
from tidegate.errors import CheckpointError
from tidegate.models.chat import ChatTemplate
from tidegate.models.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello world! 123 + 4567 = x",
    "Café déjà vu. naïve",
    "  multiple   spaces\n\n\tand\ttabs \r\n end  ",
    "I'm you're WE'LL don't 'quoted'",
    "東京とソウル 서울 — “q” … ½ ² ٣ ⅷ",
    "🌊🚤👩\u200d👩\u200d👧 e\u0301 \u00e9 ＡＢ",
    "foo_bar(x); // #include <a.h> 0x1F",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a" * 70 + " " * 9 + "!!??...",
    "Ünïcödé ЖЗИ αβγ אבג نص ไทย हिन्दी",
    "x\u00a0y\u2003z\u3000w\x00\x07",
]
CORPUS = [
    *TEXTS,
    "The quick brown fox jumps over the lazy dog and the tide comes in." * 3,
    "12 345 6789 years, years, years",
] * 4
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


def opened(path, **tokenizer):
    metadata = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    return GgufCheckpoint(write_gguf(path, "llama", llama_metadata(), embedding(), metadata))


def tokenizer_of(checkpoint):
    return Tokenizer(checkpoint.tokenizer_json(), checkpoint.special_tokens(), str(checkpoint.path))


# SmolLM2, the one published model there is here


@pytest.fixture(scope="module")
def smollm2():
    checkpoint = GgufCheckpoint(smollm2_gguf())
    theirs = transformers.AutoTokenizer.from_pretrained(str(checkpoint.path.parent), gguf_file=checkpoint.path.name)
    # transformers ignores tokenizer.ggml.pre; the published tokenizer.json keeps digits apart.
    pre = tokenizers.pre_tokenizers
    theirs.backend_tokenizer.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(False)])
    return checkpoint, tokenizer_of(checkpoint), theirs


def test_smollm2_tokens_are_those_of_transformers(smollm2):
    _, ours, theirs = smollm2
    assert ours.vocab_size == len(theirs) == 49152
    for text in [*TEXTS, *CORPUS[-2:]]:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(ANY_TEXT)
@settings(max_examples=200, deadline=None)
def test_smollm2_tokens_of_any_text(smollm2, text):
    _, ours, theirs = smollm2
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_smollm2_specials_and_chat(smollm2):
    checkpoint, ours, theirs = smollm2
    special = checkpoint.special_tokens()
    assert special == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "eos_token_ids": [2, 0],
        "add_bos": False,
    }
    messages = [{"role": "user", "content": "What is the tide?"}]
    text = ChatTemplate(checkpoint.chat_template(), special).render(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.encode(text, add_special=False)[0] == 1 and text.endswith("<|im_start|>assistant\n")


# Byte-level BPE: every rule that cuts text


def byte_level(cuts, vocab_size=500):
    """A `tokenizers` BPE that cuts text with these regexes and then GPT-2's byte alphabet."""
    pre = tokenizers.pre_tokenizers
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    steps = [pre.Split(tokenizers.Regex(cut), "isolated") for cut in cuts if cut != "gpt2"]
    model.pre_tokenizer = pre.Sequence([*steps, pre.ByteLevel(add_prefix_space=False, use_regex="gpt2" in cuts)])
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    model.train_from_iterator(CORPUS, trainer)
    return model


def gguf_of(model, path, **more):
    document = json.loads(model.to_str())
    vocab = sorted(document["model"]["vocab"], key=document["model"]["vocab"].get)
    special = {token["content"] for token in document["added_tokens"]}
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in document["model"]["merges"]]
    types = [3 if token in special else 1 for token in vocab]
    return opened(
        path, model="gpt2", tokens=vocab, token_type=types, merges=merges, bos_token_id=0, eos_token_id=1, **more
    )


@pytest.mark.parametrize("cuts", sorted(set(CUTS.values())))
def test_byte_level_tokens_are_those_of_the_trained_tokenizer(cuts, tmp_path):
    names = [name for name, value in CUTS.items() if value == cuts]
    model = byte_level(cuts)
    nfc = tokenizers.normalizers.NFC()
    for name in names:
        ours = tokenizer_of(gguf_of(model, tmp_path / f"{name}.gguf", pre=name, add_bos_token=False))
        normalizes = json.loads(ours._model.to_str())["normalizer"] is not None
        for text in TEXTS:
            want = model.encode(nfc.normalize_str(text) if normalizes else text).ids
            assert ours.encode(text) == want, (name, text)
            assert ours.decode(want) == (nfc.normalize_str(text) if normalizes else text)


def test_rules_differ_where_the_models_differ(tmp_path):
    """How many digits stay together is what tells most rules apart."""
    model = byte_level(("gpt2",))

    def pieces(name):
        steps = json.loads(gguf_of(model, tmp_path / "p.gguf", pre=name).tokenizer_json())["pre_tokenizer"]
        whole = tokenizers.Tokenizer(tokenizers.models.BPE())
        document = {**json.loads(whole.to_str()), "pre_tokenizer": steps}
        pre = tokenizers.Tokenizer.from_str(json.dumps(document)).pre_tokenizer
        return [piece.replace("Ġ", " ") for piece, _ in pre.pre_tokenize_str("I'LL pay 12345 HTTPServer's")]

    assert pieces("gpt-2") == ["I", "'", "LL", " pay", " 12345", " HTTPServer", "'s"]
    assert pieces("smollm") == ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", " HTTPServer", "'s"]
    assert pieces("llama-bpe") == ["I", "'LL", " pay", " ", "123", "45", " HTTPServer", "'s"]
    assert pieces("qwen2") == ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " HTTPServer", "'s"]
    assert pieces("gpt-4o") == ["I'LL", " pay", " ", "123", "45", " HTTPServer's"]
    assert pieces("deepseek-v3") == ["I", "'LL", " pay", " ", "123", "45", " HTTPServer", "'s"]
    assert pieces("deepseek-llm") == ["I", "'", "LL", " pay", " ", "12345", " HTTPServer", "'", "s"]


def test_the_kind_is_known_without_building_the_tokenizer(tmp_path):
    tokens = {"tokens": ["<unk>", "<s>", "</s>", "a"], "scores": [0.0, 0.0, 0.0, -1.0], "token_type": [2, 3, 3, 1]}
    checkpoints = [gguf_of(byte_level(("gpt2",)), tmp_path / "bpe.gguf", pre="gpt-2")]
    checkpoints += [
        opened(tmp_path / f"{kind}.gguf", model=kind, unknown_token_id=0, **tokens) for kind in ("llama", "t5")
    ]
    for checkpoint in checkpoints:
        document = checkpoint.tokenizer_json()
        assert (
            checkpoint.tokenizer_kind()
            == json.loads(document)["model"]["type"]
            == kind_of_tokenizer(document, tmp_path)
        )
    assert kind_of_tokenizer('{"model": {"vocab": {}, "type": "WordPiece"}}', tmp_path) == "WordPiece"
    assert kind_of_tokenizer(None, tmp_path) is None
    assert opened(tmp_path / "none.gguf").tokenizer_kind() is None


def test_bos_and_eos_are_added_as_the_file_says(tmp_path):
    model = byte_level(("gpt2",))
    plain = gguf_of(model, tmp_path / "a.gguf", pre="gpt-2")
    both = gguf_of(model, tmp_path / "b.gguf", pre="gpt-2", add_bos_token=True, add_eos_token=True)
    llama3 = gguf_of(model, tmp_path / "c.gguf", pre="llama-bpe")
    assert [c.special_tokens()["add_bos"] for c in (plain, both, llama3)] == [False, True, True]
    ids = tokenizer_of(plain).encode("hello")
    assert tokenizer_of(both).encode("hello") == [0, *ids, 1]
    assert tokenizer_of(both).encode("hello", add_special=False) == ids
    assert tokenizer_of(llama3).encode("hello")[0] == 0


def test_user_defined_tokens_are_found_but_stay_text(tmp_path):
    model = byte_level(("gpt2",))
    checkpoint = gguf_of(model, tmp_path / "a.gguf", pre="gpt-2")
    document = json.loads(checkpoint.tokenizer_json())
    vocab = list(document["model"]["vocab"])
    merges = [" ".join(pair) for pair in document["model"]["merges"]]
    tokens, types = [*vocab, "<tool>", "<|eot_id|>"], [3, 3, *[1] * (len(vocab) - 2), 4, 3]
    ours = opened(
        tmp_path / "b.gguf", model="gpt2", pre="gpt-2", tokens=tokens, token_type=types, merges=merges, eos_token_id=1
    )
    tokenizer = tokenizer_of(ours)
    ids = tokenizer.encode("a<tool>b")
    assert len(vocab) in ids and tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.eos_token_ids == (1, len(vocab) + 1)  # </s> by the metadata, <|eot_id|> by its name


# SentencePiece


def sentencepiece_model(kind, **options):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text.replace("\n", " ").replace("\x00", "") for text in CORPUS]),
        model_writer=out,
        model_type=kind,
        vocab_size=300 if kind == "unigram" else 600,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def pieces_of(sp):
    count = sp.vocab_size()

    def kind(i):
        return 2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 5 if sp.is_unused(i) else 1

    return {
        "tokens": [sp.id_to_piece(i) for i in range(count)],
        "scores": [float(sp.get_score(i)) for i in range(count)],
        "token_type": [kind(i) for i in range(count)],
        "bos_token_id": sp.bos_id(), "eos_token_id": sp.eos_id(), "unknown_token_id": sp.unk_id(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def llama_kind(tmp_path_factory):
    sp = sentencepiece_model(
        "bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False
    )
    path = tmp_path_factory.mktemp("sp") / "bpe.gguf"
    return sp, tokenizer_of(opened(path, model="llama", add_bos_token=False, **pieces_of(sp)))


@pytest.mark.parametrize("text", [text for text in TEXTS if "\x00" not in text])
def test_sentencepiece_bpe_tokens(llama_kind, text):
    sp, ours = llama_kind
    plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert ours.encode(plain) == sp.encode(plain)
    assert ours.decode(sp.encode(plain)) == plain


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581\x00"), max_size=60))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_bpe_tokens_of_any_text(llama_kind, text):
    sp, ours = llama_kind
    assert ours.encode(text) == sp.encode(text)
    assert ours.decode(ours.encode(text)) == text


def test_sentencepiece_adds_bos_unless_told_otherwise(tmp_path):
    sp = sentencepiece_model("bpe", byte_fallback=True)
    ours = tokenizer_of(opened(tmp_path / "a.gguf", model="llama", **pieces_of(sp)))
    assert ours.encode("hi")[0] == sp.bos_id()
    assert tokenizer_of(opened(tmp_path / "b.gguf", model="llama", add_space_prefix=False, **pieces_of(sp))).decode(
        ours.encode(" hi", add_special=False)[1:]
    ) in (" hi", "hi")


def test_sentencepiece_unigram_tokens(tmp_path):
    sp = sentencepiece_model("unigram", normalization_rule_name="identity", remove_extra_whitespaces=False)
    ours = tokenizer_of(opened(tmp_path / "u.gguf", model="t5", add_bos_token=False, **pieces_of(sp)))
    for text in ("The quick brown fox", "years and tide 12", "the lazy dog comes"):
        assert ours.encode(text) == sp.encode(text)
        assert ours.decode(ours.encode(text)) == text


# What cannot be


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory):
    """The bytes of files with everything in them: one of each tokenizer kind."""
    folder = tmp_path_factory.mktemp("whole")
    model = gguf_of(byte_level(("gpt2",), 300), folder / "a.gguf", pre="gpt-2", add_bos_token=True)
    sp = sentencepiece_model("bpe", byte_fallback=True)
    other = opened(folder / "b.gguf", model="llama", **pieces_of(sp))
    return [checkpoint.path.read_bytes() for checkpoint in (model, other)]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_flipped_bytes_of_a_tokenizer_are_an_error_or_harmless(whole_files, tmp_path_factory, data):
    whole = bytearray(data.draw(st.sampled_from(whole_files)))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 5000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped-tokenizer.gguf"
    path.write_bytes(whole)
    try:
        checkpoint = GgufCheckpoint(path)
        tokenizer = tokenizer_of(checkpoint)
        if tokenizer.has_text:
            tokenizer.decode(tokenizer.encode("the tide 12 🌊"))
        ChatTemplate(checkpoint.chat_template(), checkpoint.special_tokens())
    except CheckpointError:
        pass


def test_no_tokenizer_at_all(tmp_path):
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "n.gguf", "llama", llama_metadata(), embedding()))
    assert checkpoint.tokenizer_json() is None and checkpoint.chat_template() is None
    assert checkpoint.special_tokens() == {"bos_token": None, "eos_token": None, "eos_token_ids": [], "add_bos": False}


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"model": "bert", "tokens": ["a"]}, "'bert' is not supported"),
        ({"model": "gpt2", "tokens": ["a"], "merges": ["a a"], "pre": "odd"}, "'odd' is not supported"),
        ({"model": "gpt2", "tokens": ["a", "b"], "token_type": [1]}, "2 tokens, 1 types, 2 scores"),
        ({"model": "gpt2", "tokens": ["a"]}, "merges must be an array"),
        ({"model": "gpt2", "tokens": ["a", "b"], "merges": ["a c"]}, "'a c', which is no pair of tokens"),
        ({"model": "llama", "tokens": [1, 2]}, "tokens must be an array of strings"),
    ],
)
def test_tokenizers_that_cannot_be_built(tmp_path, tokenizer, message):
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / "bad.gguf", **tokenizer).tokenizer_json()
