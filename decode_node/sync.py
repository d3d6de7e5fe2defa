"""What decode asks a prefill node to say again: a pure function of its queues."""

from collections.abc import Iterable

from common.messages import Incarnation, Room, Sync
from decode_node.request import DecodeReq


def sync_with(
    peer: Incarnation,
    transferring: Iterable[DecodeReq],
    aborting: Iterable[DecodeReq],
    waiting: Iterable[DecodeReq],
    set_aside: Iterable[Room],
) -> Sync | None:
    """The rooms that decode shares with `peer`; None if there are none.

    `waiting`: requests without pages. `set_aside`: rooms whose pages are in quarantine.
    """

    def rooms(reqs: Iterable[DecodeReq]) -> list[Room]:
        return [req.room for req in reqs if req.prefill == peer]

    sync = Sync(
        open=rooms(transferring),
        cancelling=[*rooms(aborting), *set_aside],
        pending=rooms(waiting),
    )
    return sync if sync.open or sync.cancelling or sync.pending else None
