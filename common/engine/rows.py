"""A batch's rows as plain numbers: the part of a step's description that is the same everywhere.

Nothing here touches a tensor. Runners put these lists where their device wants them.
"""

from collections.abc import Sequence
from itertools import chain

from common.engine.attention.base import Span
from common.engine.lora.base import LoraRows
from common.plan import Row


def token_ids(rows: Sequence[Row], vocab_size: int) -> list[int]:
    """Of all rows, one after the other."""
    ids = list(chain.from_iterable(row.token_ids for row in rows))
    assert min(ids) >= 0, "negative token id"
    assert max(ids) < vocab_size, "token id outside the vocabulary"
    return ids


def spans_of(rows: Sequence[Row]) -> list[Span]:
    """Where each row's tokens belong."""
    return [Span(row.slot, row.start, len(row.token_ids)) for row in rows]


def places(spans: Sequence[Span], num_tokens: int) -> tuple[list[int], list[int]]:
    """Slot and position of each of `num_tokens` tokens."""
    if num_tokens == len(spans):
        return [span.slot for span in spans], [span.start for span in spans]
    slots = [span.slot for span in spans for _ in range(span.length)]
    positions = [
        position for span in spans for position in range(span.start, span.start + span.length)
    ]
    return slots, positions


def drawing_rows(rows: Sequence[Row]) -> list[int]:
    """Numbers of the rows that draw a token."""
    return [number for number, row in enumerate(rows) if row.sample_index is not None]


def last_tokens(rows: Sequence[Row], drawing: Sequence[int]) -> list[int]:
    """Where in the batch the last token of each drawing row stands."""
    ends = []
    end = 0
    for row in rows:
        end += len(row.token_ids)
        ends.append(end)
    return [ends[number] - 1 for number in drawing]


def adapted_rows(rows: Sequence[Row]) -> list[LoraRows]:
    """The tokens that compute with an adapter, in the order of the batch."""
    adapted = []
    first = 0
    for row in rows:
        if row.lora_slot is not None:
            adapted.append(LoraRows(row.lora_slot, first, len(row.token_ids)))
        first += len(row.token_ids)
    return adapted
