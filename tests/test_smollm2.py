"""A real published model, from its GGUF file to text through the whole product: header, weights, tokenizer, chat template,
store, decoder, sampling. transformers computes the same with weights dequantized by the `gguf` package."""

import numpy as np
import pytest
import torch

import smollm2
import tidegate

QUESTIONS = {
    "What is the capital of France?": "Paris",
    "Name three colors.": "Red",
    "How many days are in a week?": "7 days",
}


@pytest.fixture(scope="module")
def oracle():
    torch.set_num_threads(min(2, torch.get_num_threads()))
    return smollm2.oracle()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEGATE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def answers(dense):
    """(prompt ids, answer) of every question, greedy."""
    with tidegate.load(smollm2.gguf_path(), memory="3GiB", dense=dense, kv="f32", context=256) as model:
        for question in QUESTIONS:
            prompt = model.chat_prompt([{"role": "user", "content": question}])
            yield question, prompt, model.generate(prompt, max_tokens=20, temperature=0.0, logprobs=0)


def teacher_forced(oracle, prompt, answer_ids):
    """transformers' log probabilities at every token of the answer, given the same tokens before it."""
    ids = torch.tensor([[*prompt, *answer_ids]])
    with torch.no_grad():
        logits = oracle(ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1).numpy()


def test_greedy_answers_are_those_of_transformers(oracle, cache):
    for question, prompt, answer in answers("f32"):
        wanted = teacher_forced(oracle, prompt, answer.token_ids)
        assert answer.token_ids == wanted.argmax(axis=1).tolist()
        got = [sampled.logprob for sampled in answer.logprobs]
        np.testing.assert_allclose(got, wanted.max(axis=1), atol=2e-3)
        assert QUESTIONS[question] in answer.text, answer.text


def test_the_files_own_4_bit_weights_answer_the_same(oracle, cache):
    """The default: weights taken over exactly, inputs in 16 bits. A near tie may still fall the other way."""
    agreeing = total = 0
    for question, prompt, answer in answers("auto"):
        wanted = teacher_forced(oracle, prompt, answer.token_ids)
        agreeing += int((wanted.argmax(axis=1) == answer.token_ids).sum())
        total += len(answer.token_ids)
        assert QUESTIONS[question] in answer.text, answer.text
    assert agreeing >= 0.97 * total, f"{agreeing} of {total}"
