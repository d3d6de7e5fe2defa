"""What prefill answers decode about a room: pure functions of plain facts."""

from typing import assert_never

from common.messages import Destination, Room, RoomFailed, RoomFinished
from common.tombstones import Ending, Tombstone
from transfer.handshake import page_ids_problem


def ending(room: Room, stone: Tombstone) -> RoomFinished | RoomFailed | None:
    """The end of a room, said again; None where decode has it from the last notification."""
    match stone.ending:
        case Ending.DONE:
            return None
        case Ending.FIRST_TOKEN:
            return RoomFinished(room)
        case Ending.FAILED:
            return RoomFailed(
                room=room, kind=stone.kind, message=stone.message, landed=sorted(stone.landed)
            )
        case _:
            assert_never(stone.ending)


def destination_problem(
    destination: Destination,
    num_pages: int,
    decode_pages: int | None,
    weight_version: str,
    adapter: str,
) -> str | None:
    """Why a prompt of `num_pages` pages cannot be written there, or None.

    `decode_pages`: how many decode has; None without a link. `adapter`: digest of the one that the
    prompt is computed with; empty for none.
    """
    if destination.weight_version != weight_version:
        return (
            f"weight version is {weight_version!r} here, {destination.weight_version!r} on decode"
        )
    if destination.adapter != adapter:
        return f"the adapter is {adapter!r} here, {destination.adapter!r} on decode"
    if decode_pages is None:
        return "the link to decode is gone"
    if not 0 <= destination.first_page < num_pages:
        return f"first page {destination.first_page} of {num_pages}"
    if len(destination.pages) != num_pages - destination.first_page:
        return f"{len(destination.pages)} pages for {num_pages - destination.first_page}"
    return page_ids_problem(destination.pages, decode_pages)
