"""A byte-level BPE tokenizer that round-trips any UTF-8 text, and the token files the trainer reads.

A token file is a flat array of little-endian uint16 ids, documents joined by ``<|endoftext|>``.
Run ``python -m tidegate.train.tokenizer CORPUS DEST`` to make ``tokenizer.json`` and all token files of a corpus.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tidegate.checkpoint.files import whole_file

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAMPLE_SHARES = {"prose": 0.22, "manuals": 0.18, "code": 0.20, "chinese": 0.18, "classical": 0.09, "instructions": 0.13}
SAMPLE_CHARS = 24_000_000
VOCAB_SIZE = 8192
_SPLIT = r"[^\S\n]?\p{L}+|\p{N}{1,3}|[^\S\n]?[^\s\p{L}\p{N}]{1,8}|\n+| +(?=\S)|\s+"


def texts(path: Path) -> Iterator[str]:
    """The documents of a corpus file."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def train_tokenizer(samples: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE without normalisation: every byte is in the vocabulary, so decode(encode(x)) == x."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(samples, trainer)
    return tokenizer


def sample_domains(corpus: Path, shares: dict[str, float], total_chars: int) -> Iterator[str]:
    """Documents for training a tokenizer: evenly spread over each domain, up to its share of ``total_chars``."""
    for domain, share in shares.items():
        path = corpus / f"{domain}.train.jsonl"
        stride = max(1, int(path.stat().st_size / max(1.0, share * total_chars)))
        taken = 0
        for number, text in enumerate(texts(path)):
            if number % stride == 0 and taken < share * total_chars:
                taken += len(text)
                yield text


def write_tokens(tokenizer: Tokenizer, source: Path, destination: Path) -> int:
    """Tokenize a corpus file; returns the number of tokens. Special tokens in the text are honoured (chats)."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    count, batch = 0, []
    with whole_file(destination) as output:
        for text in [*texts(source), None]:
            if text is not None:
                batch.append(text)
            if batch and (text is None or len(batch) == 512):
                for encoding in tokenizer.encode_batch(batch):
                    ids = np.array([*encoding.ids, end], dtype="<u2")
                    count += len(ids)
                    output.write(ids.tobytes())
                batch = []
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    arguments.destination.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(sample_domains(arguments.corpus, SAMPLE_SHARES, SAMPLE_CHARS), VOCAB_SIZE)
    tokenizer.save(str(arguments.destination / "tokenizer.json"))
    for domain in SAMPLE_SHARES:
        for split in ("heldout", "train"):
            source = arguments.corpus / f"{domain}.{split}.jsonl"
            count = write_tokens(tokenizer, source, arguments.destination / f"{domain}.{split}.u16")
            print(f"{domain:13} {split:8} {count:11,} tokens", flush=True)


if __name__ == "__main__":
    main()
