"""GGUF's tokenizer metadata -> a JSON document of the `tokenizers` library.

Kinds (``tokenizer.ggml.model``): ``gpt2`` is byte-level BPE whose text is first cut by the rule that
``tokenizer.ggml.pre`` names; ``llama`` is SentencePiece BPE, which has scores instead of merges: the pair that makes the
piece of the highest score merges first; ``t5`` is SentencePiece unigram.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.checkpoint.gguf_cuts import CUTS, GPT2, LLAMA3_KINDS, NFC, UNNAMED_CUTS
from tidegate.checkpoint.gguf_header import LazyArray, Value
from tidegate.errors import CheckpointError

Json = dict[str, Any]
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
_ENDS = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|return|>", "<|call|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip


def build_tokenizer_json(path: Path, metadata: Mapping[str, Value]) -> str | None:
    """The JSON document, None for a file without a tokenizer. Raises CheckpointError for a kind or rule we do not know
    and for arrays that do not fit together."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "none" or "tokenizer.ggml.tokens" not in metadata:
        return None
    vocabulary = _Vocabulary(path, metadata)
    if kind not in _BUILDERS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model {kind!r} is not supported; supported are {', '.join(_BUILDERS)}"
        )
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        **_BUILDERS[str(kind)](vocabulary),
    }
    template = vocabulary.template()
    if template is not None:
        document["post_processor"] = template
    return json.dumps(document, ensure_ascii=False)


def tokenizer_kind(metadata: Mapping[str, Value]) -> str | None:
    """The `tokenizers` model that build_tokenizer_json would make; for a kind that it does not know, the file's word."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "none" or "tokenizer.ggml.tokens" not in metadata:
        return None
    return {"gpt2": "BPE", "llama": "BPE", "t5": "Unigram"}.get(str(kind), str(kind))


def adds_bos(metadata: Mapping[str, Value]) -> bool:
    """Whether a text starts with the bos token: the file's word, else the kind's habit."""
    value = metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(value, bool):
        return value
    return metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in LLAMA3_KINDS


def token_text(tokens: Sequence[str], token_id: Value | None) -> str | None:
    """Text of a token that the metadata names by id; None without one or out of range."""
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        return None
    return tokens[token_id]


def end_token_ids(tokens: Sequence[str], metadata: Mapping[str, Value]) -> list[int]:
    """Control tokens by whose text one knows that they end a turn, for files whose metadata names only one of several."""
    types = _load_numbers(metadata.get("tokenizer.ggml.token_type"))
    if types is None or len(types) != len(tokens):
        return []
    return [i for i in np.flatnonzero(types == _CONTROL).tolist() if tokens[i] in _ENDS]


class _Vocabulary:
    """Tokens with types and scores, checked to be of one length."""

    def __init__(self, path: Path, metadata: Mapping[str, Value]) -> None:
        self.path, self.metadata = path, metadata
        array = metadata["tokenizer.ggml.tokens"]
        if not isinstance(array, LazyArray) or array.kind != "string":
            raise CheckpointError(f"{path}: tokenizer.ggml.tokens must be an array of strings")
        self.tokens = [str(token) for token in array.load()]
        types = _load_numbers(metadata.get("tokenizer.ggml.token_type"))
        self.types = [_NORMAL] * len(self.tokens) if types is None else [int(t) for t in types]
        scores = _load_numbers(metadata.get("tokenizer.ggml.scores"))
        self.scores = [0.0] * len(self.tokens) if scores is None else [float(s) for s in scores]
        if not len(self.tokens) == len(self.types) == len(self.scores):
            counts = f"{len(self.tokens)} tokens, {len(self.types)} types, {len(self.scores)} scores"
            raise CheckpointError(f"{path}: tokenizer arrays differ in length: {counts}")
        self.ids = {token: token_id for token_id, token in reversed(list(enumerate(self.tokens)))}

    @property
    def cut(self) -> str:
        """The name of the rule that cuts text."""
        name = self.metadata.get("tokenizer.ggml.pre")
        if name is None:
            name = UNNAMED_CUTS.get(str(self.metadata.get("general.architecture")), "default")
        if name not in CUTS:
            raise CheckpointError(
                f"{self.path}: tokenizer.ggml.pre {name!r} is not supported; supported are {', '.join(CUTS)}"
            )
        return str(name)

    @property
    def space_prefix(self) -> bool:
        return bool(self.metadata.get("tokenizer.ggml.add_space_prefix", True))

    def special(self, name: str) -> str | None:
        return token_text(self.tokens, self.metadata.get(f"tokenizer.ggml.{name}_token_id"))

    def added_tokens(self) -> list[Json]:
        """Control, unknown and user-defined tokens, found in text before anything else; the first two are special."""
        named = {self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if token
            and (kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) or token_id in named)
            and self.ids[token] == token_id
        ]

    def template(self) -> Json | None:
        """Puts bos in front and eos behind, as far as the file asks for it."""
        bos = self.special("bos") if adds_bos(self.metadata) else None
        eos = self.special("eos") if self.metadata.get("tokenizer.ggml.add_eos_token") is True else None
        if bos is None and eos is None:
            return None

        def around(sequence: str, type_id: int) -> list[Json]:
            ends = [{"SpecialToken": {"id": token, "type_id": type_id}} if token else None for token in (bos, eos)]
            return [part for part in (ends[0], {"Sequence": {"id": sequence, "type_id": type_id}}, ends[1]) if part]

        return {
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": around("A", 0) + around("B", 1),
            "special_tokens": {
                token: {"id": token, "ids": [self.ids[token]], "tokens": [token]} for token in (bos, eos) if token
            },
        }


def _byte_level(vocabulary: _Vocabulary) -> Json:
    array = vocabulary.metadata.get("tokenizer.ggml.merges")
    if not isinstance(array, LazyArray) or array.kind != "string":
        raise CheckpointError(f"{vocabulary.path}: tokenizer.ggml.merges must be an array of strings")
    name = vocabulary.cut
    cuts = CUTS[name]
    steps: list[Json] = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in cuts
        if regex != GPT2
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": GPT2 in cuts})
    model = _bpe(vocabulary, _split_merges(vocabulary, [str(merge) for merge in array.load()]))
    return {
        "normalizer": {"type": "NFC"} if name in NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {**model, "ignore_merges": name in LLAMA3_KINDS},
    }


def _split_merges(vocabulary: _Vocabulary, merges: list[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in vocabulary.ids or right not in vocabulary.ids or left + right not in vocabulary.ids:
            raise CheckpointError(f"{vocabulary.path}: tokenizer.ggml.merges has {merge!r}, which is no pair of tokens")
        pairs.append((left, right))
    return pairs


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]]) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> Json:
    normalizers: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if vocabulary.space_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = [token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _UNKNOWN]
    model = _bpe(vocabulary, _merges_by_score(vocabulary))
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **model,
            "unk_token": unknown[0] if unknown else vocabulary.special("unknown"),
            "fuse_unk": True,
            "byte_fallback": _BYTE in vocabulary.types,
        },
    }


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first. SentencePiece merges the adjacent pair whose union has
    the highest score, so pairs of one piece share its rank."""
    mergeable = [
        (vocabulary.scores[token_id], token)
        for token_id, token in enumerate(vocabulary.tokens)
        if vocabulary.types[token_id] == _NORMAL and len(token) > 1
    ]
    mergeable.sort(key=lambda scored: -scored[0])
    parts = {
        token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in (_NORMAL, _UNUSED)
    }
    return [
        (token[:at], token[at:])
        for _, token in mergeable
        for at in range(1, len(token))
        if token[:at] in parts and token[at:] in parts
    ]


def _unigram(vocabulary: _Vocabulary) -> Json:
    normalizers: list[Json] = []
    charsmap = _load_numbers(vocabulary.metadata.get("tokenizer.ggml.precompiled_charsmap"))
    if charsmap is not None and len(charsmap):
        text = base64.b64encode(charsmap.astype(np.uint8).tobytes()).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": text})
    if vocabulary.metadata.get("tokenizer.ggml.remove_extra_whitespaces") is True:
        normalizers.append({"type": "Strip", "strip_left": True, "strip_right": True})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    metaspace = {
        "type": "Metaspace",
        "replacement": _SPACE,
        "prepend_scheme": "always" if vocabulary.space_prefix else "never",
        "split": True,
    }
    unknown = vocabulary.metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is None and _UNKNOWN in vocabulary.types:
        unknown = vocabulary.types.index(_UNKNOWN)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": metaspace,
        "post_processor": None,
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": list(zip(vocabulary.tokens, vocabulary.scores, strict=True)),
            "byte_fallback": _BYTE in vocabulary.types,
        },
    }


def _load_numbers(value: Value | None) -> Any:
    return np.asarray(value.load()) if isinstance(value, LazyArray) and value.kind != "string" else None


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece_bpe, "t5": _unigram}
