"""Questions and answers made by templates from dictionaries, an almanac, docstrings and poems.

Every document is a chat in ChatML: ``<|im_start|>user ... <|im_end|>`` and the assistant's turn.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidegate.train import corpus_text as text_of

Documents = Iterator[tuple[str, str]]
_PART = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


def chat(*turns: str) -> str:
    """ChatML text of alternating user and assistant turns."""
    roles = ("user", "assistant")
    return "\n".join(f"<|im_start|>{roles[at % 2]}\n{turn.strip()}<|im_end|>" for at, turn in enumerate(turns))


def pick(name: str, choices: tuple[str, ...]) -> str:
    """One of ``choices``, fixed by the name."""
    return choices[hashlib.sha256(name.encode()).digest()[0] % len(choices)]


def from_wordnet(root: Path) -> Documents:
    """Definitions, synonyms and examples of WordNet's synsets."""
    for path in sorted(root.rglob("wordnet/data.*")):
        for line in path.read_text("latin-1").splitlines():
            if line.startswith("  ") or " | " not in line:
                continue
            head, gloss = line.split(" | ", 1)
            parts = head.split(" ")
            words = [parts[4 + 2 * at].replace("_", " ").split("(")[0] for at in range(int(parts[3], 16))]
            meaning, *quotes = re.split(r";\s*(?=\")", gloss.strip())
            word, kind = words[0], _PART[parts[2]]
            ask = pick(line, (
                "What does the {k} “{w}” mean?", "Define “{w}”.", "What is the meaning of the {k} {w}?",
                "Explain the word “{w}” in one sentence.", "{w}: what is that?",
            )).format(w=word, k=kind)  # fmt: skip
            answer = f"As {'an' if kind[0] == 'a' else 'a'} {kind}, “{word}” means: {meaning.rstrip('; ')}."
            if len(words) > 1:
                answer += " You can also say " + " or ".join(words[1:4]) + "."
            if quotes:
                answer += " For example: " + " ".join(quote.strip("; ") for quote in quotes[:2])
            yield f"{path.name}:{parts[0]}", chat(ask, answer)


def from_factbook(root: Path) -> Documents:
    """Facts of every country, one question a field, a few to a chat."""
    for path in sorted(root.rglob("*.json")):
        if path.name == "package.json":
            continue
        country = json.loads(path.read_text("utf-8"))
        names = country.get("Government", {}).get("Country name", {})
        name = names.get("conventional short form", {}).get("text", "").split(" (")[0]
        if not name or name == "none":
            continue
        turns: list[str] = []
        for section, entries in country.items():
            for title, entry in entries.items():
                value = entry.get("text") if isinstance(entry, dict) else None
                if isinstance(value, str) and 3 < len(value) < 600:
                    ask = pick(name + title, (
                        "What can you tell me about {n} under “{t}”?", "{t} of {n}?",
                        "Tell me about {n}: {t}.", "I am writing about {n}. What should I say about {t}?",
                    )).format(n=name, t=title.lower())  # fmt: skip
                    turns += [ask, value]
            if len(turns) >= 4:
                yield f"{path.stem}:{section}", chat(*turns)
                turns = []
        capital = country.get("Government", {}).get("Capital", {}).get("name", {}).get("text", "").split(";")[0]
        if capital:
            yield (
                f"{path.stem}:capital",
                chat(f"What is the capital of {name}?", f"The capital of {name} is {capital}."),
            )


def from_foldoc(root: Path) -> Documents:
    """Terms of computing."""
    folder = next(root.rglob("foldoc.index")).parent
    seen = set()
    for word, article in text_of.dictd_entries(folder, "foldoc"):
        body = article.split("\n", 1)[-1]
        paragraphs = [" ".join(part.split()) for part in textwrap.dedent(body).split("\n\n")]
        answer = "\n\n".join(re.sub(r"[{}]", "", part) for part in paragraphs if part and not part.startswith("("))
        if len(answer) > 120 and not word.startswith("00") and answer not in seen:
            seen.add(answer)
            ask = pick(word, ("What is {w} in computing?", "Explain {w}.", "What does “{w}” mean to a programmer?"))
            yield word, chat(ask.format(w=word), answer[:2500])


def _documented(tree: ast.AST, prefix: str) -> Iterator[tuple[str, str, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            doc = ast.get_docstring(node)
            signature = ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else ""
            if doc:
                yield f"{prefix}.{node.name}", signature, inspect.cleandoc(doc)
            if isinstance(node, ast.ClassDef):
                yield from _documented(node, f"{prefix}.{node.name}")


def from_docstrings(root: Path) -> Documents:
    """Public functions and classes of Python packages with their docstrings."""
    for path in sorted(root.rglob("*.py")):
        name = str(path.relative_to(root)).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        if re.search(r"\b_?tests?\b|conftest|\._", name):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for full, signature, doc in _documented(tree, name):
            if 80 < len(doc) < 3000:
                ask = pick(
                    full, ("What does `{f}` do?", "How do I use `{f}` in Python?", "Document the Python name `{f}`.")
                )
                shown = f"`{full.rsplit('.', 1)[-1]}({signature})`\n\n" if signature else ""
                yield full, chat(ask.format(f=full), shown + doc)


def from_poems(root: Path) -> Documents:
    """Who wrote a poem, and what it says: the Song lyrics and the poems with a modern explanation."""
    for path in sorted(root.glob("package/dist/songci/ci.song.*.json"))[::3]:
        for number, poem in enumerate(json.loads(path.read_text("utf-8"))):
            yield from _poem_chat(f"{path.stem}-{number}", poem, poem.get("rhythmic", ""))
    for path in sorted(root.glob("package/dist/shuimotangshi/*.json")):
        for number, poem in enumerate(json.loads(path.read_text("utf-8"))):
            yield from _poem_chat(f"{path.stem}-{number}", poem, poem.get("title", ""))


def _poem_chat(name: str, poem: dict[str, Any], title: str) -> Documents:
    lines = "\n".join(poem.get("paragraphs", []))
    if not lines or not title:
        return
    author, turns = poem.get("author", "佚名"), []
    turns += pick(name, (
        f"请背诵{author}的《{title}》。\x00{lines}",
        f"“{poem['paragraphs'][0]}”是谁写的？\x00这是{author}的《{title}》。全文是：\n{lines}",
        f"写一首《{title}》。\x00{lines}",
    )).split("\x00")  # fmt: skip
    if poem.get("prologue"):
        turns += ["这首诗是什么意思？", str(poem["prologue"])]
    yield name, chat(*turns)
