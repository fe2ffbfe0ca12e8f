"""Tokenizer and its incremental decoder: round trips over unicode, whole characters only, clear errors without one."""

import json

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.errors import CheckpointError
from tidegate.models.tokenizer import Tokenizer

CORPUS = [
    "The tide comes in, the tide goes out; 1234 boats and 56 gulls.",
    "Größe, naïve café, déjà vu — “quotes” … 東京とソウル 서울 🌊🚤👩‍👩‍👧",
    "def f(x):\n    return x + 1\n\n\tindented  twice",
] * 8
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "eos_token_ids": [1], "add_bos": False}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def trained(byte_level=True):
    """A small BPE: byte-level as GPT-2's, or with byte fallback and spaces as U+2581 like Llama's."""
    specials = ["<s>", "</s>", "<|im_start|>"]
    if byte_level:
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        model = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        norms = tokenizers.normalizers
        model.normalizer = norms.Sequence([norms.Prepend("\u2581"), norms.Replace(" ", "\u2581")])
        decs = tokenizers.decoders
        model.decoder = decs.Sequence(
            [decs.Replace("\u2581", " "), decs.ByteFallback(), decs.Fuse(), decs.Strip(" ", 1, 0)]
        )
        specials, alphabet = ["<unk>", *specials, *(f"<0x{b:02X}>" for b in range(256))], []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=specials,
        initial_alphabet=alphabet,
        limit_alphabet=256 if byte_level else 60,
        show_progress=False,
    )
    model.train_from_iterator(CORPUS, trainer)
    document = json.loads(model.to_str())
    document["added_tokens"] = [t for t in document["added_tokens"] if not t["content"].startswith("<0x")]
    return json.dumps(document)


@pytest.fixture(scope="module", params=[True, False], ids=["byte_level", "byte_fallback"])
def tokenizer(request):
    return Tokenizer(trained(request.param), SPECIAL)


def streamed(tokenizer, ids):
    decoder = tokenizer.stream()
    pieces = [decoder.push(token_id) for token_id in ids]
    return [*pieces, decoder.flush()]


@given(text=TEXTS)
@example("🌊" * 30)
@example("  two  spaces \n\n and a tab\t")
@example("x\ufffdy\ufffd")
@settings(max_examples=200, deadline=None)
def test_streamed_pieces_are_whole_characters_and_together_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_ids_stream_to_the_end(tokenizer, data):
    """A model may write anything: nothing is lost but stray bytes, which become U+FFFD, one or several."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=40))
    pieces, whole = streamed(tokenizer, ids), tokenizer.decode(ids)
    assert (
        "".join(pieces).replace("\ufffd", "").strip(" ") == whole.replace("\ufffd", "").strip(" ") or "\ufffd" in whole
    )


def test_a_character_of_four_tokens_comes_out_at_once(tokenizer):
    ids = tokenizer.encode("a🜲b", add_special=False)
    pieces = streamed(tokenizer, ids)
    assert [piece for piece in pieces if piece] == ["a", "🜲", "b"] or "🜲b" in pieces


def test_bytes_that_never_become_text_are_not_held_for_ever(tokenizer):
    stray = tokenizer.token_id("<0xF0>") or tokenizer.token_id("ð")
    decoder = tokenizer.stream()
    text = "".join(decoder.push(stray) for _ in range(200))
    assert len(decoder._window) < 100 and set(text) == {"\ufffd"}


def test_special_tokens_are_found_in_text_and_left_out_of_it(tokenizer):
    ids = tokenizer.encode("<|im_start|>hi</s>", add_special=False)
    assert ids[0] == tokenizer.token_id("<|im_start|>") and ids[-1] == tokenizer.token_id("</s>")
    assert tokenizer.decode(ids).strip() == "hi"
    assert "<|im_start|>" in tokenizer.decode(ids, skip_special=False)


def test_bos_is_added_once_and_only_when_wanted():
    tokenizer = Tokenizer(trained(), {**SPECIAL, "add_bos": True})
    bos = tokenizer.token_id("<s>")
    assert tokenizer.bos_token_id == bos
    assert tokenizer.encode("hi")[0] == bos and tokenizer.encode("<s>hi").count(bos) == 1
    assert bos not in tokenizer.encode("hi", add_special=False)


def test_lone_surrogates_are_replaced(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_without_a_tokenizer_only_text_is_refused():
    tokenizer = Tokenizer(None, {"eos_token_ids": [7]}, "model.gguf")
    assert not tokenizer.has_text and tokenizer.vocab_size == 0 and tokenizer.eos_token_ids == (7,)
    for use in (
        lambda: tokenizer.encode("x"),
        lambda: tokenizer.decode([1]),
        tokenizer.stream,
        lambda: tokenizer.token(1),
    ):
        with pytest.raises(CheckpointError, match=r"model\.gguf has no tokenizer"):
            use()


@pytest.mark.parametrize("text", ["{", "{}", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}'])
def test_a_broken_document_is_named(text):
    with pytest.raises(CheckpointError, match=r"model\.gguf: tokenizer that cannot be used"):
        Tokenizer(text, SPECIAL, "model.gguf")
