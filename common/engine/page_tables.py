"""Which pages each slot has: the host's side of a runner's page table.

The table itself is a tensor [slots, pages] of the runner's device; `enter` says what has to change
in it for a step, as flat places and values, so that one copy does it for all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.plan import Row


@dataclass(frozen=True, slots=True)
class TableChange:
    """What a step's rows bring into the page table."""

    places: list[int]
    """`slot * width + column` of each new entry."""
    pages: list[int]
    """The new entries."""
    fresh: list[int]
    """Those of the pages that hold nothing computed before.

    Masked keys and values still enter the arithmetic, and 0 * NaN is NaN: whatever a page's earlier
    owner left must not reach the tail of its new one, so these are to be cleared.
    """


class PageTables:
    """Counts the pages of each slot, and asserts what the scheduler guarantees of rows."""

    def __init__(self, max_slots: int, max_model_len: int, page_size: int, num_pages: int) -> None:
        self.width = -(-max_model_len // page_size)
        """Pages of the longest sequence: columns of the table."""
        self._max_model_len = max_model_len
        self._page_size = page_size
        self._pool_pages = num_pages
        self._num_pages = [0] * max_slots

    def enter(self, rows: Sequence[Row]) -> TableChange:
        """Take in the rows' new owners and new pages."""
        change = TableChange([], [], [])
        for row in rows:
            end = row.start + len(row.token_ids)
            assert row.token_ids, "a row computes at least one token"
            assert end <= self._max_model_len, f"position {end - 1} is beyond the model's length"
            if row.init is not None:
                self._num_pages[row.slot] = 0
            if row.new_pages:
                self._append(row, change)
            assert end <= self._num_pages[row.slot] * self._page_size, (
                f"slot {row.slot} has no page for position {end - 1}"
            )
        return change

    def _append(self, row: Row, change: TableChange) -> None:
        count = self._num_pages[row.slot]
        total = count + len(row.new_pages)
        assert total <= self.width, f"slot {row.slot} holds {total} pages"
        assert min(row.new_pages) >= 0, "negative page id"
        assert max(row.new_pages) < self._pool_pages, "page id outside the pool"
        first = row.slot * self.width
        change.places.extend(range(first + count, first + total))
        change.pages.extend(row.new_pages)
        self._num_pages[row.slot] = total
        used = -(-row.start // self._page_size)
        change.fresh.extend(row.new_pages[max(0, used - count) :])
