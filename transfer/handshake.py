"""What two nodes check of each other before a page may travel. Pure."""

from collections.abc import Sequence

import msgspec

from common.messages import Fingerprint, PeerMemory
from transfer.boxes import MAX_SLOTS, WORD_BYTES
from transfer.head_ranges import HeadRange, ranges_problem
from transfer.slots import LEAST_SLOTS

MAX_PAGES = 1 << 24
"""More pages than any real pool has: what a peer claims sizes arrays here."""
MAX_METADATA_BYTES = 1 << 20
"""A thousand times what an agent's metadata takes."""
MAX_DEVICE_ID = 1 << 16
KINDS = ("DRAM", "VRAM")


def mismatch(ours: Fingerprint, theirs: Fingerprint) -> str | None:
    """The first field in which two fingerprints differ, with both values; None if none does."""
    for field in msgspec.structs.fields(Fingerprint):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != other:
            return f"{field.name} differs: {mine!r} here, {other!r} on the peer"
    return None


def heads_of(memory: PeerMemory) -> HeadRange:
    """The KV heads that a rank's pages hold."""
    return HeadRange(memory.first_head, memory.num_heads)


def memories_problem(
    memories: Sequence[PeerMemory], num_kv_heads: int, head_bytes: int
) -> str | None:
    """Why a peer's ranks cannot be written to; None if they can.

    `num_kv_heads`: of the whole model. `head_bytes`: what one of them takes in a page, here.
    """
    problem = ranges_problem([heads_of(memory) for memory in memories], num_kv_heads)
    if problem is not None:
        return problem
    if len({memory.agent_name for memory in memories}) != len(memories):
        return "two ranks have one agent name"
    if len({memory.num_pages for memory in memories}) != 1:
        return "the ranks' pools have different numbers of pages"
    for rank, memory in enumerate(memories):
        problem = memory_problem(memory, head_bytes)
        if problem is not None:
            return f"rank {rank}: {problem}" if len(memories) > 1 else problem
    return None


def memory_problem(memory: PeerMemory, head_bytes: int) -> str | None:
    """Why the pool of one rank cannot be written to; None if it can."""
    if memory.num_heads < 1 or memory.first_head < 0:
        return f"{memory.num_heads} KV heads from {memory.first_head} on"
    if memory.page_bytes != memory.num_heads * head_bytes:
        heads = f"{memory.num_heads} KV heads of {head_bytes} bytes"
        return f"page_bytes differs: {heads} a page here, {memory.page_bytes} on the peer"
    if memory.num_pages <= 0 or memory.base_address <= 0:
        return f"no usable pool: {memory.num_pages} pages at {memory.base_address:#x}"
    if memory.num_pages > MAX_PAGES:
        return f"{memory.num_pages} pages are more than {MAX_PAGES}"
    if memory.base_address + memory.num_pages * memory.page_bytes >= 1 << 64:
        return "the pool exceeds the address space"
    if memory.kind not in KINDS or not 0 <= memory.device_id < MAX_DEVICE_ID:
        return f"no memory that is known here: {memory.kind[:20]!r} {memory.device_id}"
    if not memory.agent_name or len(memory.metadata) > MAX_METADATA_BYTES:
        return f"no agent: {memory.agent_name[:80]!r}, {len(memory.metadata)} bytes of metadata"
    return None


def stage_problem(memory: PeerMemory) -> str | None:
    """Why writes cannot go to a pool's stage in its place; None if they can, or there is none."""
    stage = memory.stage
    if stage is None:
        return None
    if not LEAST_SLOTS <= stage.num_slots <= MAX_SLOTS or stage.address <= 0:
        return f"no usable stage: {stage.num_slots} pages at {stage.address:#x}"
    if stage.num_boxes != memory.num_pages * memory.num_heads or stage.boxes_address <= 0:
        return f"no usable boxes: {stage.num_boxes} at {stage.boxes_address:#x}"
    if stage.address + stage.num_slots * memory.page_bytes >= 1 << 64:
        return "the stage exceeds the address space"
    if stage.boxes_address + stage.num_boxes * WORD_BYTES >= 1 << 64:
        return "the boxes exceed the address space"
    return None


def write_problem(
    source_pages: Sequence[int], target_pages: Sequence[int], num_own: int, num_theirs: int
) -> str | None:
    """Why pages of a pool of `num_own` cannot go into those of one of `num_theirs`."""
    if not source_pages or len(source_pages) != len(target_pages):
        return f"{len(source_pages)} pages into {len(target_pages)}"
    problem = page_ids_problem(source_pages, num_own)
    if problem is not None:
        return f"source: {problem}"
    problem = page_ids_problem(target_pages, num_theirs)
    return None if problem is None else f"target: {problem}"


def page_ids_problem(pages: Sequence[int], num_pages: int) -> str | None:
    """Why a list of page ids cannot be a destination in a pool of `num_pages`; None if it can."""
    if len(set(pages)) != len(pages):
        return "a page is named twice"
    if pages and (min(pages) < 0 or max(pages) >= num_pages):
        return f"page ids must be in [0, {num_pages})"
    return None
