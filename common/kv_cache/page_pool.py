"""Page ids, free or not; knows nothing of requests, of content or of tensors."""

from collections import deque
from collections.abc import Iterable


class PageLeak(Exception):
    """What is held and the free list disagree: a bug."""


class PagePool:
    """A fixed number of page ids, each free or held."""

    def __init__(self, num_pages: int) -> None:
        if num_pages <= 0:
            raise ValueError(f"a pool needs pages, not {num_pages}")
        self.num_pages = num_pages
        self._free: deque[int] = deque(range(num_pages))
        self._free_last: deque[int] = deque()
        self._held = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._free_last)

    @property
    def num_preferred(self) -> int:
        """Free pages but for those that are given away last."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing changed) if there are fewer."""
        if count > self.num_free:
            return None
        pages = [(self._free or self._free_last).popleft() for _ in range(count)]
        for page in pages:
            self._held[page] = True
        return pages

    def free(self, pages: Iterable[int], *, last: bool = False) -> None:
        """Take pages back. `last`: give them away only when nothing else is free."""
        for page in pages:
            if not self._held[page]:
                raise PageLeak(f"page {page} is freed but nobody holds it")
            self._held[page] = False
            (self._free_last if last else self._free).append(page)

    def check(self, held: Iterable[int]) -> None:
        """Raise `PageLeak` unless exactly the pages in `held` are held, each once."""
        counts = [0] * self.num_pages
        for page in held:
            counts[page] += 1
        if counts != list(self._held):
            wrong = [p for p in range(self.num_pages) if counts[p] != self._held[p]]
            raise PageLeak(f"pages {wrong[:8]} have other owners than it is believed")
        free = sorted((*self._free, *self._free_last))
        if free != [p for p in range(self.num_pages) if counts[p] == 0]:
            raise PageLeak("the free list is not the set of pages without owners")
