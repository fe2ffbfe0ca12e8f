"""Plain text out of HTML, reStructuredText, program text and a few odd formats. Standard library only."""

from __future__ import annotations

import gzip
import html
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

_DROPPED = re.compile(
    r"<!--.*?-->|<(script|style|head|nav|header|footer|form|svg|button|aside)\b.*?</\1\s*>", re.DOTALL | re.IGNORECASE
)
_PREFORMATTED = re.compile(r"<pre\b[^>]*>(.*?)</pre\s*>", re.DOTALL | re.IGNORECASE)
_BLOCK = re.compile(
    r"</?(p|div|li|ul|ol|dt|dd|dl|h[1-6]|tr|table|br|section|article|blockquote|hr)\b[^>]*>", re.IGNORECASE
)
_TAG = re.compile(r"<[^>]*>")
_SPACE = re.compile(r"[ \t\r\f\v\u00a0\u200b]+")
_NAVIGATION = re.compile(
    r"^(prev(ious)?|next|up|home|index|contents|table of contents|copyright.*|last updated.*|view this page.*|"
    r"上一页|下一页|上一頁|下一頁|目录|.*\| *next *\|.*)$",
    re.IGNORECASE,
)


def read_text(path: Path) -> str:
    """A text file, gzip-compressed or not, as UTF-8; undecodable bytes are dropped."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return data.decode("utf-8", "ignore")


def from_html(source: str) -> str:
    """Readable text: a paragraph a line, blocks of program text kept as they are, no navigation."""
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(html.unescape(_TAG.sub("", match[1])).strip("\n"))
        return f"\n\x00{len(kept) - 1}\x00\n"

    body = _PREFORMATTED.sub(keep, _DROPPED.sub(" ", source)).replace("\n", " ")
    body = re.sub(r" ?(\x00\d+\x00) ?", r"\n\1\n", body)
    body = html.unescape(_TAG.sub("", _BLOCK.sub("\n", body)))
    lines = []
    for line in body.split("\n"):
        line = _SPACE.sub(" ", line).strip().rstrip("¶#§").strip()
        mark = re.fullmatch(r"\x00(\d+)\x00", line)
        if mark:
            lines.append(kept[int(mark[1])])
        elif line and not _NAVIGATION.match(line):
            lines.append(line)
    return "\n".join(lines)


def from_rst(source: str) -> str:
    """reStructuredText with comments, directives' options, targets and role markup taken off."""
    lines = []
    for line in source.split("\n"):
        stripped = line.strip()
        if re.match(r"^(\.\. |:[\w-]+:)", stripped) or re.fullmatch(r"([=\-~^\"'#*+.])\1{2,}", stripped):
            continue
        line = re.sub(r":[\w:.+-]+:`~?!?([^`<]*?)\s*(<[^`>]*>)?`", r"\1", line)
        line = re.sub(r"``([^`]*)``|`([^`<]+?)\s*(<[^`>]*>)?`_{0,2}", lambda m: m[1] or m[2] or "", line)
        lines.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


_LICENCE_WORDS = re.compile(r"copyright|licen[cs]e|redistribution|warrant|spdx|all rights reserved", re.IGNORECASE)


def from_program(source: str) -> str:
    """Program text without the licence comment at its head."""
    match = re.match(r"\s*(/\*.*?\*/|(?://[^\n]*\n)+|(?:#[^\n]*\n)+)", source, re.DOTALL)
    if match and _LICENCE_WORDS.search(match[1]):
        source = source[match.end() :]
    return re.sub(r"\n{4,}", "\n\n\n", source.replace("\t", "    ")).strip("\n")


def from_man(source: str) -> str:
    """A manual page's text: macros and font changes taken off."""
    lines = []
    for line in source.split("\n"):
        if line.startswith(('.\\"', "'\\\"", ".TH", ".de", ".ds", ".if", ".ie", ".el", ".nr")):
            continue
        line = re.sub(r"^\.(SH|SS)\s*", "\n", line)
        line = re.sub(r"^\.[A-Za-z]{1,3}\b\s*", "", line)
        line = re.sub(r"\\f[A-Z]|\\f\(..|\\s[+-]?\d|\\&|\\[|^]", "", line)
        line = line.replace("\\-", "-").replace("\\(bu", "*").replace("\\e", "\\").replace('"', "")
        lines.append(re.sub(r"\\\(..|\\\*\S", "", line).strip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def mo_messages(data: bytes) -> Iterator[tuple[str, str]]:
    """(original, translation) pairs of a compiled gettext catalogue."""
    order = "<" if data[:4] == b"\xde\x12\x04\x95" else ">"
    count, originals, translations = struct.unpack(order + "3I", data[8:20])
    for index in range(count):
        pair = []
        for table in (originals, translations):
            length, offset = struct.unpack(order + "2I", data[table + 8 * index : table + 8 * index + 8])
            pair.append(data[offset : offset + length].decode("utf-8", "ignore").split("\x04")[-1])
        yield pair[0], pair[1]


def r_strings(data: bytes) -> Iterator[list[str]]:
    """Character vectors in an R lazy-load database: zlib-compressed XDR objects one after the other."""
    at = 0
    while at + 4 < len(data):
        try:
            engine = zlib.decompressobj()
            plain = engine.decompress(data[at + 4 :])
        except zlib.error:
            return
        at = len(data) - len(engine.unused_data)
        found, position = [], 0
        mark = re.compile(rb"\x00[\x04\x00].{0}[\x00-\x08]\x09(.{4})", re.DOTALL)
        while match := mark.search(plain, position):
            length = struct.unpack(">i", match[1])[0]
            position = match.end() + max(0, length)
            found.append(plain[match.end() : position].decode("utf-8", "ignore") if length > 0 else "")
        yield found


def dictd_entries(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """(headword, article) pairs of a dictd dictionary, in the order of its index."""
    digits = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}

    def number(text: str) -> int:
        value = 0
        for char in text:
            value = value * 64 + digits[char]
        return value

    text = gzip.decompress((folder / f"{name}.dict.dz").read_bytes())
    for line in (folder / f"{name}.index").read_text("utf-8").splitlines():
        word, start, length = line.split("\t")[:3]
        yield word, text[number(start) : number(start) + number(length)].decode("utf-8", "ignore")
