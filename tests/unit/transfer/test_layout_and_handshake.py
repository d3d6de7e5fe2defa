"""Pages to addresses, and what peers check of each other."""

import msgspec
import pytest

from common.messages import WIRE_VERSION, Fingerprint, PeerMemory
from transfer.handshake import MAX_PAGES, memory_problem, mismatch, page_ids_problem
from transfer.layout import page_indices, page_rows

FINGERPRINT = Fingerprint(
    wire_version=WIRE_VERSION,
    model="m",
    dtype="float32",
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    page_size=16,
)
MEMORY = PeerMemory(agent_name="a", metadata=b"", base_address=4096, num_pages=8, page_bytes=2048)


def test_rows_are_address_length_device_of_each_page() -> None:
    rows = page_rows(base_address=1 << 46, num_pages=3, page_bytes=368_640, device_id=5)
    assert rows.tolist() == [[(1 << 46) + i * 368_640, 368_640, 5] for i in range(3)]
    assert rows.dtype == "uint64"


def test_rows_of_a_pool_beyond_four_gigabytes_do_not_wrap() -> None:
    rows = page_rows(base_address=7, num_pages=3, page_bytes=3 << 30)
    assert int(rows[2, 0]) == 7 + (6 << 30)


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
    ],
)
def test_unusable_pools_are_refused(change: dict[str, int], word: str) -> None:
    assert memory_problem(MEMORY, 2048) is None
    problem = memory_problem(msgspec.structs.replace(MEMORY, **change), 2048)
    assert problem is not None
    assert word in problem


def test_page_ids_are_in_range_and_named_once() -> None:
    assert page_ids_problem((0, 7), 8) is None
    assert page_ids_problem((), 8) is None
    for pages in ((8,), (-1,), (3, 3)):
        assert page_ids_problem(pages, 8) is not None
