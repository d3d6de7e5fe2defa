"""Pages from measured numbers: never more than is allowed or free, and errors with the numbers."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from common.engine.errors import MemoryPlanError
from common.engine.memory_plan import (
    GIB,
    RESERVE_BYTES,
    MemoryReadings,
    gauge_of,
    plan_pages,
    read_memory,
)

H200 = MemoryReadings(
    total=140 * GIB, unused_by_others=139 * GIB, free=123 * GIB, weights=15 * GIB, working=4 * GIB
)
PAGE = 2 << 20


def test_pages_get_what_the_others_leave() -> None:
    allowed = int(140 * GIB * 0.85)
    assert plan_pages(H200, 0.85, PAGE) == (allowed - 19 * GIB - RESERVE_BYTES) // PAGE
    everything = (123 - 4) * GIB - RESERVE_BYTES
    assert plan_pages(H200, 1.0, PAGE) == everything // PAGE, "bounded by what is free"


def test_what_does_not_fit_is_refused_with_all_the_numbers() -> None:
    small = MemoryReadings(
        total=24 * GIB, unused_by_others=20 * GIB, free=5 * GIB, weights=15 * GIB, working=6 * GIB
    )
    with pytest.raises(MemoryPlanError) as refused:
        plan_pages(small, 0.85, PAGE, adapters=int(0.75 * GIB), device="cuda:0")
    said = str(refused.value)
    for number in (
        "24.00",
        "0.85",
        "20.40",
        "4.00",
        "5.00",
        "15.00",
        "6.00",
        "0.75",
        "0.50",
        "-2.25",
    ):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", said), number
    assert "cuda:0" in said
    assert "2.00 MiB" in said
    assert "chunk_size" in said


def test_the_last_page_that_fits_is_given() -> None:
    exact = MemoryReadings(total=100, unused_by_others=100, free=60, weights=40, working=20)
    assert plan_pages(exact, 1.0, 23, adapters=7, reserve=10) == 1
    with pytest.raises(MemoryPlanError):
        plan_pages(exact, 1.0, 24, adapters=7, reserve=10)


sizes = st.integers(0, 200 * GIB)
readings = st.builds(
    MemoryReadings, total=sizes, unused_by_others=sizes, free=sizes, weights=sizes, working=sizes
)
fractions = st.floats(0.01, 1.0)
page_sizes = st.integers(1 << 10, 64 << 20)


def pages_or_none(given: MemoryReadings, fraction: float, page: int) -> int:
    try:
        return plan_pages(given, fraction, page)
    except MemoryPlanError:
        return 0


@given(readings, fractions, page_sizes)
def test_never_more_than_allowed_or_free_and_never_a_page_too_few(
    given: MemoryReadings, fraction: float, page: int
) -> None:
    pages = pages_or_none(given, fraction, page)
    allowed = int(given.total * fraction)
    beside = given.working + RESERVE_BYTES
    if pages:
        assert given.weights + beside + pages * page <= allowed
        assert beside + pages * page <= given.free
    more = beside + (pages + 1) * page
    assert given.weights + more > allowed or more > given.free


@given(readings, fractions, page_sizes, st.integers(1, 50 * GIB), st.data())
def test_monotone_in_every_number(
    given: MemoryReadings, fraction: float, page: int, step: int, data: st.DataObject
) -> None:
    pages = pages_or_none(given, fraction, page)
    better: dict[str, Callable[[], int]] = {
        "total": lambda: pages_or_none(replace(given, total=given.total + step), fraction, page),
        "free": lambda: pages_or_none(replace(given, free=given.free + step), fraction, page),
        "fraction": lambda: pages_or_none(given, min(1.0, fraction * 1.3), page),
        "page": lambda: pages_or_none(given, fraction, max(1, page - 1)),
    }
    worse: dict[str, Callable[[], int]] = {
        "weights": lambda: pages_or_none(
            replace(given, weights=given.weights + step), fraction, page
        ),
        "working": lambda: pages_or_none(
            replace(given, working=given.working + step), fraction, page
        ),
    }
    for name, count in better.items():
        assert count() >= pages, name
    for name, count in worse.items():
        assert count() <= pages, name


@given(st.integers(10, 180), st.integers(1, 30), st.integers(0, 8), st.integers(1, 4))
def test_nodes_that_divide_a_gpu_never_exceed_it(
    total: int, weights: int, working: int, nodes: int
) -> None:
    """Each only knows its own share; they start one after the other."""
    left, held = total * GIB, 0
    for _ in range(nodes):
        assume(left > weights * GIB)
        given = MemoryReadings(
            total=total * GIB,
            unused_by_others=left,
            free=left - weights * GIB,
            weights=weights * GIB,
            working=working * GIB,
        )
        pages = pages_or_none(given, 0.9 / nodes, PAGE)
        if pages:
            left -= weights * GIB + pages * PAGE
            held += weights * GIB + (working * GIB) + pages * PAGE
    assert held <= 0.9 * total * GIB


@dataclass
class FakeGauge:
    """A device of `size` bytes whose allocator keeps what it once had, as torch's does."""

    size: int = 1000
    others: int = 100
    cached: int = 0
    used: int = 0
    most: int = 0
    order: list[str] = field(default_factory=list)

    def take(self, count: int) -> None:
        self.used += count
        self.cached = max(self.cached, self.used)
        self.most = max(self.most, self.cached)

    def give_back(self, count: int) -> None:
        self.used -= count

    def total(self) -> int:
        return self.size

    def free(self) -> int:
        return self.size - self.others - self.cached

    def held(self) -> int:
        return self.cached

    def most_held(self) -> int:
        return self.most

    def settle(self) -> None:
        self.order.append("settle")
        self.cached = self.most = self.used


def test_readings_tell_weights_from_work() -> None:
    gauge = FakeGauge()
    gauge.take(500)
    gauge.give_back(100)  # a tensor that loading was done with

    def profile() -> None:
        gauge.order.append("profile")
        gauge.take(150)
        gauge.give_back(150)

    got = read_memory(gauge, profile)
    assert got == MemoryReadings(
        total=1000, unused_by_others=900, free=500, weights=400, working=150
    )
    assert gauge.order == ["settle", "profile", "settle"]


def test_a_batch_that_does_not_fit_is_no_traceback() -> None:
    gauge = FakeGauge(size=10 * GIB, others=GIB)
    gauge.take(8 * GIB)

    def profile() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nmore")

    message = "beside 8.00 GiB of weights, of 10.00 GiB others leave 9.00: CUDA out of memory"
    with pytest.raises(MemoryPlanError, match=re.escape(message)):
        read_memory(gauge, profile)


def test_host_memory_is_not_measured() -> None:
    assert gauge_of(torch.device("cpu")) is None
