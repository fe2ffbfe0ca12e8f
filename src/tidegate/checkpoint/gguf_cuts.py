"""How text is cut before byte-level BPE merges it, by the name in ``tokenizer.ggml.pre``: regular expressions, applied one after
the other, as the models' own tokenizers have them. Facts, one per published tokenizer."""

from __future__ import annotations

_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# cl100k's rule; llama3, glm4 and qwen2 differ in how many digits stay together.
_GPT4 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _WHITESPACE
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+ENGLISH|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*ENGLISH"
    r"|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _WHITESPACE
)
_O200K = _GPT4O.replace("ENGLISH", _ENGLISH + "?").replace("DIGITS", "{1,3}")
_TEKKEN = _GPT4O.replace("ENGLISH", "").replace("DIGITS", "")
_LLAMA3 = _GPT4.replace("DIGITS", "{1,3}")
_QWEN2 = _GPT4.replace("DIGITS", "")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _WHITESPACE,
)
_HAN_TO_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN_TO_HANGUL,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_TO_HANGUL, r"\p{N}")
GPT2, _DIGITS = "gpt2", r"\p{N}"  # "gpt2": the byte-level step's own rule

CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "default", "olmo", "dolma", "mpt", "phi-2", "jais", "trillion", "granite-docling"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (_DIGITS, GPT2)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "grok-2"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_O200K,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
}  # fmt: skip
# Kinds that start a text with the bos token and whose merges yield to whole words of the vocabulary.
LLAMA3_KINDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
# Kinds whose texts are normalized first.
NFC = ("qwen2", "qwen35", "deepseek-r1-qwen", "olmo", "dolma", "megrez")
# The rule of files without a name for it, by architecture.
UNNAMED_CUTS = {"qwen2moe": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2"}
