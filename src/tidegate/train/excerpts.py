"""Short held-out texts, a file a domain, from sources whose licences let them lie in a repository.

Run ``python -m tidegate.train.excerpts CORPUS DEST``. Documents are spread over the held-out split and joined by the
end-of-text token; ``tidegate eval MODEL DEST/*.txt`` scores a model on them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tidegate.train.corpus_sources import DOMAINS, SOURCES
from tidegate.train.tokenizer import END_OF_TEXT

EXCERPT_BYTES = 48_000
DOCUMENT_CHARS = 4000
_COPYLEFT = ("GPL", "GFDL", "CC-BY-SA")


def excerpt(corpus: Path, domain: str) -> str:
    """Beginnings of evenly spread held-out documents, about EXCERPT_BYTES in all."""
    open_packages = {source.package for source in SOURCES if not any(word in source.licence for word in _COPYLEFT)}
    with (corpus / f"{domain}.heldout.jsonl").open(encoding="utf-8") as lines:
        records = [record for line in lines if (record := json.loads(line))["source"] in open_packages]
    parts, total_bytes = [], 0
    order = sorted(range(len(records)), key=lambda at: (at * 0.6180339887498949) % 1.0)
    for at in order:
        text = records[at]["text"]
        part = text if len(text) <= DOCUMENT_CHARS else text[:DOCUMENT_CHARS].rsplit("\n", 1)[0]
        parts.append(part)
        total_bytes += len(part.encode())
        if total_bytes > EXCERPT_BYTES:
            break
    return END_OF_TEXT.join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    arguments.destination.mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        (arguments.destination / f"{domain}.txt").write_text(excerpt(arguments.corpus, domain), encoding="utf-8")


if __name__ == "__main__":
    main()
