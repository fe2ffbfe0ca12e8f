"""The corpus: text out of its formats, duplicates, held-out documents, chats; and the batches made of it."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from tidegate.errors import UsageError
from tidegate.train import corpus, corpus_text, instructions
from tidegate.train.corpus_sources import SOURCES, Source, files, poem_lines, poems
from tidegate.train.data import Sampler, heldout_windows


def test_html_keeps_paragraphs_and_programs_and_drops_the_rest() -> None:
    source = """<html><head><title>x</title></head><body><nav><a>Menu</a></nav><h1>Title¶</h1>
    <p>One &amp; <b>two</b>
    lines.</p><pre class="c">int  x;\n  &lt;y&gt;</pre><p>Next</p><script>evil()</script><ul><li>item</li></ul></body>"""
    assert corpus_text.from_html(source) == "Title\nOne & two lines.\nint  x;\n  <y>\nitem"


def test_rst_loses_its_markup() -> None:
    source = ".. index:: x\n\nTitle\n=====\n\nUse :func:`~os.open` or ``x`` and `a link <http://x>`_.\n:width: 3\n"
    assert corpus_text.from_rst(source) == "Title\n\nUse os.open or x and a link."


def test_licence_heads_go_and_other_comments_stay() -> None:
    assert corpus_text.from_program("/* Copyright X */\nint a;\n") == "int a;"
    assert corpus_text.from_program("/* Adds. */\nint a;\n") == "/* Adds. */\nint a;"
    assert corpus_text.from_program("# Licence: MIT\n\nx = 1\n") == "x = 1"


def test_gettext_catalogues_give_pairs() -> None:
    pairs = [(b"Hello", "你好".encode()), (b"ctx\x04World", "世界".encode())]
    header, tables, text = 28, b"", b""
    at = header + 16 * len(pairs)
    for column in (0, 1):
        for pair in pairs:
            tables += struct.pack("<2I", len(pair[column]), at + len(text))
            text += pair[column] + b"\0"
    data = struct.pack("<7I", 0x950412DE, 0, len(pairs), header, header + 8 * len(pairs), 0, 0) + tables + text
    assert list(corpus_text.mo_messages(data)) == [("Hello", "你好"), ("World", "世界")]


def test_r_character_vectors() -> None:
    def char(text: str) -> bytes:
        return b"\x00\x04\x00\x09" + struct.pack(">i", len(text)) + text.encode()

    block = zlib.compress(b"X\n\0\0\0\x02" + b"".join(char(text) for text in ("first line", "", "second")))
    data = struct.pack(">i", 100) + block + struct.pack(">i", 100) + block
    assert list(corpus_text.r_strings(data)) == [["first line", "", "second"]] * 2


def test_dictionaries_in_dictd_format(tmp_path: Path) -> None:
    (tmp_path / "d.dict.dz").write_bytes(gzip.compress(b"first articlesecond"))
    (tmp_path / "d.index").write_text("one\tA\tN\ntwo\tN\tG\n")
    assert list(corpus_text.dictd_entries(tmp_path, "d")) == [("one", "first article"), ("two", "second")]


def test_manual_pages() -> None:
    page = ".TH X 1\n.SH NAME\nls \\- list\n.B bold\n\\fItext\\fR\n"
    assert corpus_text.from_man(page) == "NAME\nls - list\nbold\ntext"


def test_poems_in_every_layout(tmp_path: Path) -> None:
    poem = {
        "title": "靜夜思",
        "author": "李白",
        "paragraphs": ["床前[明]月光，", "疑是地上霜。"],
        "strains": ["平平"],
        "id": "7",
    }
    assert poem_lines(poem) == ["靜夜思 李白", "床前明月光，", "疑是地上霜。"]
    nested = {"title": "書", "content": [{"chapter": "一", "paragraphs": ["甲"]}]}
    assert poem_lines(nested) == ["書", "一", "甲"]
    folder = tmp_path / "package" / "dist" / "x"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps([poem, poem]))
    assert [text.count("李白") for _, text in poems(("x/*.json",))(tmp_path)] == [2]


def test_second_copies_and_mostly_repeated_documents_are_dropped() -> None:
    duplicates = corpus.Deduplicator()
    long = "A paragraph that is certainly long enough to be compared with all others. " * 2
    assert duplicates.clean(f"{long}\nshort") == f"{long}\nshort".strip()
    assert duplicates.clean(f"{long}\nshort") == ""
    fresh = "Something else that nobody has seen before and that is longer than the copy. " * 4
    assert duplicates.clean(f"{long}\n{fresh}") == fresh.strip()


def test_lines_of_many_documents_are_boilerplate() -> None:
    texts = [f"Menu\nText {at}" for at in range(40)]
    assert corpus.boilerplate(texts) == {"Menu"}


def test_a_corpus_is_made_with_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache" / "deb-thing"
    cache.mkdir(parents=True)
    (cache / ".complete").touch()
    for at in range(300):
        (cache / f"{at:03}.py").write_text(f"value = {at}\n" * 50)
    source = Source("code", "deb", "thing", "MIT", lambda root: files(root, "*.py", corpus_text.from_program))
    monkeypatch.setattr(corpus, "SOURCES", (source,))
    report = corpus.make(tmp_path / "out", tmp_path / "cache")
    train = (tmp_path / "out" / "code.train.jsonl").read_text().splitlines()
    heldout = (tmp_path / "out" / "code.heldout.jsonl").read_text().splitlines()
    assert len(train) + len(heldout) == report[0]["documents"] == 300
    assert 0 < len(heldout) < 20
    assert not {json.loads(line)["name"] for line in train} & {json.loads(line)["name"] for line in heldout}
    assert json.loads((tmp_path / "out" / "sources.json").read_text())[0]["licence"] == "MIT"


def test_every_source_names_a_licence() -> None:
    assert all(source.licence for source in SOURCES)
    assert {source.domain for source in SOURCES} == set(corpus.DOMAINS)


def test_chats_of_a_dictionary(tmp_path: Path) -> None:
    folder = tmp_path / "wordnet"
    folder.mkdir()
    line = '00001740 03 n 02 tide 0 tidal_flow 0 000 | the rise and fall of the sea; "the tide was low"  \n'
    (folder / "data.noun").write_text("  1 licence\n" + line)
    ((name, text),) = instructions.from_wordnet(tmp_path)
    assert name == "data.noun:00001740"
    assert text.startswith("<|im_start|>user\n")
    assert 'the rise and fall of the sea. You can also say tidal flow. For example: "the tide was low"' in text
    assert text.endswith("<|im_end|>")


def write_tokens(path: Path, count: int, start: int) -> Path:
    path.write_bytes((np.arange(count) + start).astype("<u2").tobytes())
    return path


def test_batches_mix_domains_by_their_shares_without_repeats(tmp_path: Path) -> None:
    paths = {"a": write_tokens(tmp_path / "a", 4000, 0), "b": write_tokens(tmp_path / "b", 4000, 10_000)}
    sampler = Sampler(paths, {"a": 3.0, "b": 1.0}, 10, seed=5)
    batch = sampler.batch(0, 400)
    assert batch.shape == (400, 11)
    assert (batch[:, 0] < 10_000).sum() == 300
    assert len(np.unique(batch[:, 0])) == 400
    assert (np.diff(batch) == 1).all()
    assert np.array_equal(Sampler(paths, {"a": 3.0, "b": 1.0}, 10, seed=5).batch(100, 7), batch[100:107])
    assert not np.array_equal(Sampler(paths, {"a": 3.0, "b": 1.0}, 10, seed=6).batch(0, 400), batch)


def test_a_second_epoch_cuts_elsewhere(tmp_path: Path) -> None:
    sampler = Sampler({"a": write_tokens(tmp_path / "a", 400, 0)}, {"a": 1.0}, 10, seed=5)
    first, second = sampler.batch(0, 38), sampler.batch(38, 38)
    assert len({int(row[0]) % 10 for row in first}) == len({int(row[0]) % 10 for row in second}) == 1
    assert first[0, 0] % 10 != second[0, 0] % 10


def test_too_few_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fewer than two sequences"):
        Sampler({"a": write_tokens(tmp_path / "a", 15, 0)}, {"a": 1.0}, 10, seed=0)
    assert heldout_windows(write_tokens(tmp_path / "h", 100, 0), 10, 4)[:, 0].tolist() == [0, 20, 50, 80]


def test_an_index_of_sources_is_made_from_either_form_of_list() -> None:
    assert corpus.for_sources("# note\ndeb http://x a b\ndeb-src http://x a b\n") == "# note\ndeb-src http://x a b\n"
    assert corpus.for_sources("Types: deb\nURIs: http://x\n") == "Types: deb-src\nURIs: http://x\n"
