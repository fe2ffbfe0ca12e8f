"""Which KV page belongs to which sequence: integers only. The bytes are in the arena, their layout in KvLayout.

A sequence gets every page it can ever need when it is admitted, so one that runs never runs out.
"""

from __future__ import annotations


class KvCache:
    """``num_pages`` pages of ``page_tokens`` positions each."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self._free = list(range(num_pages - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` positions of one sequence take."""
        return -(-num_tokens // self.page_tokens)

    def allocate(self, sequence_id: int, num_tokens: int) -> list[int] | None:
        """Pages for ``num_tokens`` positions, or None (and nothing changes) when too few are free."""
        assert sequence_id not in self._pages, f"sequence {sequence_id} has pages already"
        count = self.pages_for(num_tokens)
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._pages[sequence_id] = pages
        return pages

    def free(self, sequence_id: int) -> None:
        """Take the pages back; nothing happens for a sequence without pages."""
        self._free.extend(reversed(self._pages.pop(sequence_id, [])))

    def check_integrity(self) -> None:
        """Every page is either free or owned by exactly one sequence."""
        owned = [page for pages in self._pages.values() for page in pages]
        assert sorted(owned + self._free) == list(range(self.num_pages)), "KV pages lost or owned twice"
