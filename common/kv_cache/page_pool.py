"""Page ids and reference counts; knows nothing of requests or tensors."""

from collections import deque
from collections.abc import Iterable


class PageLeak(Exception):
    """Reference counts and the free list disagree: a bug."""


class PagePool:
    """A fixed number of page ids, each free or held by one or more owners."""

    def __init__(self, num_pages: int) -> None:
        if num_pages <= 0:
            raise ValueError(f"a pool needs pages, not {num_pages}")
        self.num_pages = num_pages
        self._free: deque[int] = deque(range(num_pages))
        self._free_last: deque[int] = deque()
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._free_last)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one owner each, or None (and nothing changed) if there are fewer."""
        if count > self.num_free:
            return None
        pages = [(self._free or self._free_last).popleft() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def free(self, pages: Iterable[int], *, last: bool = False) -> None:
        """Drop one owner of each page; a page without owners is free again.

        `last`: give it away only when nothing else is free.
        """
        for page in pages:
            if self._references[page] <= 0:
                raise PageLeak(f"page {page} is freed but nobody holds it")
            self._references[page] -= 1
            if self._references[page] == 0:
                (self._free_last if last else self._free).append(page)

    def check(self, held: Iterable[int]) -> None:
        """Raise `PageLeak` unless exactly the pages in `held` (with multiplicity) are held."""
        counts = [0] * self.num_pages
        for page in held:
            counts[page] += 1
        if counts != self._references:
            wrong = [p for p in range(self.num_pages) if counts[p] != self._references[p]]
            raise PageLeak(f"pages {wrong[:8]} have owners and counts that differ")
        free = sorted((*self._free, *self._free_last))
        if free != [p for p in range(self.num_pages) if counts[p] == 0]:
            raise PageLeak("the free list is not the set of pages without owners")
