"""How a page of tokens is named: by a hash chained over everything before it. Pure, without torch.

    root  = H(model, dtype, layout, weight version, adapter)
    hash0 = H(root  + tokens of page 0)
    hash1 = H(hash0 + tokens of page 1)   ...

Equal hashes mean equal tokens *and* an equal past computed by the same weights, so equal KV. Nodes
key their caches by all 16 bytes; what travels to routers, and what these remember, is the first 8
(`key`): there a collision costs a detour, never a wrong answer. After vLLM's chained block hashes.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from common.messages import Fingerprint, encode

HASH_BYTES = 16
KEY_BYTES = 8


def root(fingerprint: Fingerprint, weight_version: str = "", adapter_digest: str = "") -> bytes:
    """Where the chains of one model begin, with one version of its weights and one adapter."""
    identity = encode((fingerprint, weight_version, adapter_digest))
    return blake2b(identity, digest_size=HASH_BYTES).digest()


def key(page_hash: bytes) -> int:
    """The short name of a page, as routers know it."""
    return int.from_bytes(page_hash[:KEY_BYTES], "little")


class PageHashes:
    """The hashes of a growing list of tokens, full page by full page."""

    __slots__ = ("_hashes", "_page_size", "_root")

    def __init__(self, root: bytes, page_size: int) -> None:
        self._root = root
        self._page_size = page_size
        self._hashes: list[bytes] = []

    @property
    def num_known(self) -> int:
        """Pages whose hashes are known."""
        return len(self._hashes)

    def first(self, num_pages: int) -> list[bytes]:
        """Hashes of the first `num_pages` pages; so many must be known."""
        assert num_pages <= len(self._hashes), f"{num_pages} of {len(self._hashes)} page hashes"
        return self._hashes[:num_pages]

    def extend(self, tokens: Sequence[int]) -> None:
        """The tokens behind the known pages, as far as they fill pages."""
        size, hashes = self._page_size, self._hashes
        num_pages = len(tokens) // size
        if not num_pages:
            return
        data = memoryview(array("i", tokens[: num_pages * size])).cast("B")
        width = data.nbytes // num_pages
        last = hashes[-1] if hashes else self._root
        for start in range(0, data.nbytes, width):
            state = blake2b(last, digest_size=HASH_BYTES)
            state.update(data[start : start + width])
            last = state.digest()
            hashes.append(last)

    def upto(self, num_pages: int, tokens: Sequence[int]) -> list[bytes]:
        """Hashes of the first `num_pages` pages of `tokens`, which may have grown since the last
        call but has not changed.

        Raises:
            IndexError: `tokens` does not fill so many pages.
        """
        if num_pages > self.num_known:
            size = self._page_size
            if num_pages * size > len(tokens):
                raise IndexError(f"{len(tokens)} tokens do not fill {num_pages} pages of {size}")
            self.extend(tokens[self.num_known * size : num_pages * size])
        return self.first(num_pages)
