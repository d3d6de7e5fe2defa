"""What must hold between two steps, checked after every step of the tests. Pure."""

from collections.abc import Mapping
from typing import Any

from common.lifecycle import IllegalTransition, ReqQueue, State
from common.messages import Room
from common.request import Req
from common.tombstones import Tombstones


def check_queues(
    queues: Mapping[State, ReqQueue[Any]], reqs: Mapping[Room, Req], tombstones: Tombstones
) -> None:
    """Raise IllegalTransition unless each request is in one queue, in rank order, and alive."""
    queued = [req for queue in queues.values() for req in queue]
    if sorted(r.room for r in queued) != sorted(reqs):
        raise IllegalTransition("queues and the table of requests differ")
    for state, queue in queues.items():
        members = list(queue)
        if any(req.queue is not queue for req in members):
            raise IllegalTransition(f"a request in {state.name} names another queue")
        if members != sorted(members, key=lambda req: req.rank):
            raise IllegalTransition(f"{state.name} is out of order")
    ended = [room for room in reqs if room in tombstones]
    if ended:
        raise IllegalTransition(f"rooms {ended} live beside their tombstones")
