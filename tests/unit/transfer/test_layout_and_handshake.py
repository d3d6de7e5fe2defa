"""Pages to addresses, and what peers check of each other."""

from typing import Any

import msgspec
import numpy as np
import pytest

from common.messages import WIRE_VERSION, Fingerprint, PeerMemory
from transfer.handshake import (
    MAX_DEVICE_ID,
    MAX_METADATA_BYTES,
    MAX_PAGES,
    memories_problem,
    memory_problem,
    mismatch,
    page_ids_problem,
)
from transfer.head_ranges import MAX_RANKS
from transfer.layout import check_layout, common_rows, page_indices, page_rows

FINGERPRINT = Fingerprint(
    wire_version=WIRE_VERSION,
    model="m",
    dtype="float32",
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    page_size=16,
)
HEAD_BYTES = 1024
MEMORY = PeerMemory(
    agent_name="a",
    metadata=b"",
    base_address=4096,
    num_pages=8,
    page_bytes=2 * HEAD_BYTES,
    first_head=0,
    num_heads=2,
)


def pool(**fields: Any) -> PeerMemory:
    return msgspec.structs.replace(MEMORY, **fields)


def test_rows_are_address_length_device_of_each_page() -> None:
    memory = pool(base_address=1 << 46, num_pages=3, page_bytes=368_640, device_id=5)
    rows = page_rows(memory)
    assert rows.tolist() == [[(1 << 46) + i * 368_640, 368_640, 5] for i in range(3)]
    assert rows.dtype == "uint64"
    assert page_rows(memory, (2, 0)).tolist() == [rows[2].tolist(), rows[0].tolist()]


def test_rows_of_a_pool_beyond_four_gigabytes_do_not_wrap() -> None:
    memory = pool(base_address=7, num_pages=3, page_bytes=3 << 30, num_heads=1)
    assert int(page_rows(memory)[2, 0]) == 7 + (6 << 30)
    half = pool(base_address=7, num_pages=3, page_bytes=6 << 30, num_heads=2)
    _, rows = common_rows(memory, half, 1, (2,), (2,))
    assert rows.tolist() == [[7 + (12 << 30), 3 << 29, 0], [7 + (15 << 30), 3 << 29, 0]]


def test_rows_of_some_heads_are_where_a_pool_has_them() -> None:
    """Against the strides of a tensor as the engine has it."""
    layers, page_size, dim = 3, 4, 8
    ours = np.zeros((5, layers, 2, 4, page_size, dim), np.float32)  # heads 2 to 5
    theirs = np.zeros((7, layers, 2, 2, page_size, dim), np.float32)  # heads 3 and 4
    memories = [
        pool(
            base_address=tensor.ctypes.data,
            num_pages=len(tensor),
            page_bytes=tensor[0].nbytes,
            first_head=first,
            num_heads=tensor.shape[3],
            device_id=device,
        )
        for tensor, first, device in ((ours, 2, 1), (theirs, 3, 2))
    ]
    here, there = common_rows(memories[0], memories[1], layers, (4, 0), (6, 1))
    for rows, tensor, pages, device in ((here, ours, (4, 0), 1), (there, theirs, (6, 1), 2)):
        skipped = 3 - (2 if tensor is ours else 3)
        assert rows.tolist() == [
            [part.ctypes.data, part.nbytes, device]
            for page in pages
            for layer in range(layers)
            for part in (tensor[page, layer, kv, skipped : skipped + 2] for kv in (0, 1))
        ]


@pytest.mark.parametrize(("page_bytes", "num_layers"), [(2048, 3), (1023, 1), (2048, 0)])
def test_pages_that_are_no_whole_layers_of_heads_are_refused(
    page_bytes: int, num_layers: int
) -> None:
    check_layout(MEMORY, 4)
    with pytest.raises(ValueError, match="equal parts"):
        check_layout(pool(page_bytes=page_bytes), num_layers)


def test_indices_are_int32_in_the_given_order() -> None:
    indices = page_indices((5, 0, 3))
    assert indices.tolist() == [5, 0, 3]
    assert indices.dtype == "int32"


def test_equal_fingerprints_match() -> None:
    assert mismatch(FINGERPRINT, msgspec.structs.replace(FINGERPRINT)) is None


@pytest.mark.parametrize("field", [field.name for field in msgspec.structs.fields(Fingerprint)])
def test_a_differing_field_is_named_with_both_values(field: str) -> None:
    ours = getattr(FINGERPRINT, field)
    theirs = ours + 1 if isinstance(ours, int) else ours + "-other"
    problem = mismatch(FINGERPRINT, msgspec.structs.replace(FINGERPRINT, **{field: theirs}))
    assert problem is not None
    assert problem.startswith(field)
    assert repr(ours) in problem
    assert repr(theirs) in problem


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"page_bytes": 4096}, "page_bytes"),
        ({"num_pages": 0}, "pool"),
        ({"num_pages": -1}, "pool"),
        ({"num_pages": MAX_PAGES + 1}, "pages"),
        ({"base_address": 0}, "pool"),
        ({"base_address": -4096}, "pool"),
        ({"base_address": (1 << 64) - 4096}, "address space"),
        ({"page_bytes": 0}, "page_bytes"),
        ({"page_bytes": -2048}, "page_bytes"),
        ({"num_heads": 1}, "page_bytes"),
        ({"num_heads": 0}, "KV heads"),
        ({"num_heads": -2}, "KV heads"),
        ({"first_head": -1}, "KV heads"),
        ({"kind": "FLOPPY"}, "memory"),
        ({"kind": ""}, "memory"),
        ({"device_id": -1}, "memory"),
        ({"device_id": MAX_DEVICE_ID}, "memory"),
        ({"agent_name": ""}, "agent"),
        ({"metadata": bytes(MAX_METADATA_BYTES + 1)}, "metadata"),
    ],
)
def test_unusable_pools_are_refused(change: dict[str, Any], word: str) -> None:
    assert memory_problem(MEMORY, HEAD_BYTES) is None
    problem = memory_problem(pool(**change), HEAD_BYTES)
    assert problem is not None
    assert word in problem
    ranks = (MEMORY, pool(**{"agent_name": "b", "first_head": 2} | change))
    among = memories_problem(ranks, 4, HEAD_BYTES)
    assert among is not None


def ranks(*heads: tuple[int, int], **fields: Any) -> tuple[PeerMemory, ...]:
    return tuple(
        pool(
            agent_name=f"rank {rank}",
            first_head=first,
            num_heads=count,
            page_bytes=count * HEAD_BYTES,
            **fields,
        )
        for rank, (first, count) in enumerate(heads)
    )


@pytest.mark.parametrize(
    "heads",
    [((0, 4),), ((0, 2), (2, 2)), ((2, 2), (0, 2)), ((0, 3), (3, 1)), ((0, 2),) * 2 + ((2, 2),)],
)
def test_ranks_that_hold_all_heads_are_taken(heads: tuple[tuple[int, int], ...]) -> None:
    assert memories_problem(ranks(*heads), 4, HEAD_BYTES) is None


@pytest.mark.parametrize(
    ("memories", "word"),
    [
        ((), "0 ranks"),
        (ranks(*[(0, 4)] * (MAX_RANKS + 1)), "65 ranks"),
        (ranks((0, 2)), "hold 2 KV heads, not 4"),
        (ranks((0, 4), (4, 4)), "hold 8 KV heads, not 4"),
        (ranks((0, 1), (2, 2)), "no rank has KV head 1"),
        (ranks((0, 3), (2, 2)), "not equal"),
        (ranks((0, 4), (0, 0)), "0 KV heads"),
        (ranks((-4, 8)), "negative"),
        (ranks((0, 4)) * 2, "one agent name"),
        ((*ranks((0, 2)), *ranks((2, 2), num_pages=9)), "agent name"),
        ((ranks((0, 2), (2, 2))[0], ranks((0, 2), (2, 2), num_pages=9)[1]), "numbers of pages"),
        (
            (ranks((0, 2))[0], pool(agent_name="b", first_head=2, page_bytes=1)),
            "rank 1: page_bytes",
        ),
    ],
)
def test_ranks_that_make_no_node_are_refused(memories: tuple[PeerMemory, ...], word: str) -> None:
    problem = memories_problem(memories, 4, HEAD_BYTES)
    assert problem is not None
    assert word in problem


def test_page_ids_are_in_range_and_named_once() -> None:
    assert page_ids_problem((0, 7), 8) is None
    assert page_ids_problem((), 8) is None
    for pages in ((8,), (-1,), (3, 3)):
        assert page_ids_problem(pages, 8) is not None
