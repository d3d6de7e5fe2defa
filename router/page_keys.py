"""The page keys of one job: hashed once, kept for its replays, which only add to them. Pure."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from common.kv_cache.hashing import PageHashes, key, root
from common.messages import Fingerprint

_root = lru_cache(maxsize=1024)(root)


class Lineage(NamedTuple):
    """What nodes must have in common to compute equal KV."""

    fingerprint: Fingerprint
    weight_version: str


class PageKeys:
    """Keys of the full pages of a growing list of tokens, for each lineage that asks."""

    __slots__ = ("_adapter_digest", "_chains")

    def __init__(self, adapter_digest: str = "") -> None:
        self._adapter_digest = adapter_digest
        self._chains: dict[Lineage, tuple[PageHashes, list[int]]] = {}

    def of_prefix(self, lineage: Lineage, tokens: Sequence[int]) -> list[int]:
        """Of the full pages of `tokens` that a hit may have: not of the page with the last one."""
        page_size = lineage.fingerprint.page_size
        num_pages = max(0, len(tokens) - 1) // page_size
        chain = self._chains.get(lineage)
        if chain is None:
            start = _root(lineage.fingerprint, lineage.weight_version, self._adapter_digest)
            chain = self._chains[lineage] = (PageHashes(start, page_size), [])
        hashes, keys = chain
        if len(keys) < num_pages:
            keys += map(key, hashes.upto(num_pages, tokens)[len(keys) :])
        return keys if len(keys) == num_pages else keys[:num_pages]
