"""Whether decode may take a request's pages now, and who gives pages back: pure decisions."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from common.lifecycle import ReqQueue, State
from decode_node.request import DecodeReq


def reserve(pages_to_grow: Iterable[int], per_request: int) -> int:
    """Pages to keep free for requests that are already active.

    `pages_to_grow`: for each, the pages it may still ask for until its `max_tokens`. Each is given
    up to `per_request`, so that running requests seldom have to be retracted for a new one.
    """
    return sum(min(per_request, pages) for pages in pages_to_grow)


def fits(need: int, free: int, reserved: int, *, alone: bool) -> bool:
    """Whether a request that needs `need` pages now may be admitted.

    `alone`: no other request is active, so nobody's growth has to be guarded; every request was
    checked at arrival to fit an empty pool, which is why the first in rank always gets its turn.
    """
    return need + (0 if alone else reserved) <= free


def has_room(need: int, grows: int, others: Sequence[int], free: int, per_request: int) -> bool:
    """Whether a request may be admitted that takes `need` of `free` pages now and may ask for
    `grows` more later. `others`: how many each active request may ask for.

    What it shares with others it does not take, so `need` is no measure of what it has.
    """
    return fits(need, free, reserve((*others, grows), per_request), alone=not others)


def pages_to_go_on(reqs: Iterable[DecodeReq], pages_for: Callable[[int], int]) -> int:
    """Pages that these lack for their next token's KV, counting tokens that are being drawn."""
    return sum(max(0, pages_for(r.num_tokens + r.drawing) - len(r.pages)) for r in reqs)


def choose_victim(queues: Mapping[State, ReqQueue[DecodeReq]]) -> DecodeReq | None:
    """Of the last in rank of each queue, the one to retract; never the first of all.

    One whose pages are still being written gives nothing back at once, so such a one is asked only
    when nobody else is left, and one at a time.
    """
    holders = [queues[s] for s in (State.RUNNING, State.WAITING, State.PREFILLING)]
    if sum(map(len, holders)) > 1:
        return max(filter(None, (queue.last for queue in holders)), key=lambda req: req.rank)
    return None if len(queues[State.ABORTING]) else queues[State.TRANSFER].last
