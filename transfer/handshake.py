"""What two nodes check of each other before a page may travel. Pure."""

from collections.abc import Sequence

import msgspec

from common.messages import Fingerprint, PeerMemory

MAX_PAGES = 1 << 24
"""More pages than any real pool has: what a peer claims sizes arrays here."""


def mismatch(ours: Fingerprint, theirs: Fingerprint) -> str | None:
    """The first field in which two fingerprints differ, with both values; None if none does."""
    for field in msgspec.structs.fields(Fingerprint):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != other:
            return f"{field.name} differs: {mine!r} here, {other!r} on the peer"
    return None


def memory_problem(memory: PeerMemory, page_bytes: int) -> str | None:
    """Why a peer's pool cannot be written to by one with pages of `page_bytes`; None if it can."""
    if memory.page_bytes != page_bytes:
        return f"page_bytes differs: {page_bytes} here, {memory.page_bytes} on the peer"
    if memory.num_pages <= 0 or memory.base_address <= 0:
        return f"no usable pool: {memory.num_pages} pages at {memory.base_address:#x}"
    if memory.num_pages > MAX_PAGES:
        return f"{memory.num_pages} pages are more than {MAX_PAGES}"
    if memory.base_address + memory.num_pages * memory.page_bytes >= 1 << 64:
        return "the pool exceeds the address space"
    return None


def page_ids_problem(pages: Sequence[int], num_pages: int) -> str | None:
    """Why a list of page ids cannot be a destination in a pool of `num_pages`; None if it can."""
    if len(set(pages)) != len(pages):
        return "a page is named twice"
    if pages and (min(pages) < 0 or max(pages) >= num_pages):
        return f"page ids must be in [0, {num_pages})"
    return None
