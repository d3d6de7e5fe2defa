"""What a prefix cache could save at best: one that keeps every page ever computed. Pure.

A hit is what a node may make of it (`docs/architecture.md`): whole pages from the beginning on,
never the one with the prompt's last token. Requests that arrive together count as one after the
other, so that the second finds what the first computes: no real cache does better.
"""

from collections.abc import Sequence

from common.kv_cache.hashing import HASH_BYTES, PageHashes

ROOT = bytes(HASH_BYTES)


class InfiniteCache:
    """One for the whole cluster."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: set[bytes] = set()

    def __len__(self) -> int:
        """Pages in it."""
        return len(self._pages)

    def hit(self, prompt: Sequence[int]) -> int:
        """How many of these tokens need not be computed."""
        most = (len(prompt) - 1) // self._page_size
        for depth, page in enumerate(self._hashes(prompt)[:most]):
            if page not in self._pages:
                return depth * self._page_size
        return most * self._page_size

    def add(self, tokens: Sequence[int]) -> None:
        """KV of all of these tokens has been computed."""
        self._pages.update(self._hashes(tokens))

    def _hashes(self, tokens: Sequence[int]) -> list[bytes]:
        return PageHashes(ROOT, self._page_size).upto(len(tokens) // self._page_size, tokens)


def saved(prompts: Sequence[Sequence[int]], cache: InfiniteCache) -> int:
    """Prompt tokens that need not be computed when `prompts` come one after the other."""
    total = 0
    for prompt in prompts:
        total += cache.hit(prompt)
        cache.add(prompt)
    return total
