"""Which KV page belongs to which sequence: integers only. The bytes are in the arena, their layout in KvLayout.

A sequence gets every page it can ever need when it is admitted, so one that runs never runs out. Pages that are given back keep
their bytes until somebody gets them, and the next one gets the same ones in the same order: if it begins with the same tokens,
like the next turn of a chat, so much of it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile


class KvCache:
    """``num_pages`` pages of ``page_tokens`` positions each."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self._free = list(range(num_pages - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}
        self._left: tuple[list[int], list[int]] = [], []  # tokens and pages of who gave back last, while they are there

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` positions of one sequence take."""
        return -(-num_tokens // self.page_tokens)

    def allocate(
        self, sequence_id: int, num_tokens: int, beginning: Sequence[int] = ()
    ) -> tuple[list[int], int] | None:
        """Pages for ``num_tokens`` positions, and how many tokens of ``beginning`` they hold already; None (and nothing changes)
        when too few are free."""
        assert sequence_id not in self._pages, f"sequence {sequence_id} has pages already"
        count = self.pages_for(num_tokens)
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._pages[sequence_id] = pages
        left_tokens, left_pages = self._left
        self._left = [], []
        return pages, min(_num_equal(left_tokens, beginning), self.page_tokens * _num_equal(left_pages, pages))

    def free(self, sequence_id: int, computed: Sequence[int]) -> None:
        """Take the pages back, with the tokens that are ``computed`` in them; nothing happens for a sequence without pages."""
        pages = self._pages.pop(sequence_id, [])
        if pages:
            self._free.extend(reversed(pages))
            self._left = list(computed), pages

    def check_integrity(self) -> None:
        """Every page is either free or owned by exactly one sequence."""
        owned = [page for pages in self._pages.values() for page in pages]
        assert sorted(owned + self._free) == list(range(self.num_pages)), "KV pages lost or owned twice"


def _num_equal(some: Iterable[int], others: Iterable[int]) -> int:
    """At the start of both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))
