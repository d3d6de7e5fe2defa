"""What a transfer backend is: it copies KV pages into a peer's pool and says how each copy ended.

A prefill node submits `AddPeer`, `RenewLease`, `Write`; a decode node only registers its pool,
answers nothing, and hears of landed writes through `Notified`. Every node may do both.

A node has a backend for each of its ranks, which writes to peers of one rank (`nixl`, `memory`);
`sharded` makes one backend of them, whose peers may have any number of ranks.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from common.messages import PeerMemory
from common.plan import TransferCommand, TransferEvent


class TransferBackend(Protocol):
    """One-sided writes of pages between registered pools. The contract of all backends:

    **Endings.** Every submitted `Write` ends with exactly one `WriteDone` or `WriteFailed`,
    whatever becomes of its peer: unknown, removed, dead, lease over, page ids wrong, this backend
    closed. From that event on this side neither reads the write's source pages nor sends bytes to
    its target pages. A write to a peer that is merely stopped ends when the peer goes on, dies, or
    the transport gives it up; nothing calls a posted write back.

    **Notifications.** `Notified` appears at the target only after all bytes of its own write are in
    place. Two writes may land in any order, also when one was submitted long before the other. A
    write may land, and notify, although its sender reports `WriteFailed` (the acknowledgement was
    lost), never the reverse. No two writes of a node may have equal notifications, and none may
    begin with `pieces.MARK`. Where a write comes in several pieces, from rank to rank,
    `PieceLanded` tells of each but the last.

    **Leases.** A `Write` is posted only while `clock() < until` of its peer's newest `RenewLease`,
    checked right before posting. Without a `RenewLease` since `AddPeer` nothing is posted. A write
    that waits for anything before it can be posted fails once its lease is over.

    **Fences.** A backend with a fence posts no `Write` before what was computed until its `submit`
    has finished. It then holds back what follows for the same peer, but for renewed leases.

    **Stages.** Where pages go through host memory a `Write` is done, and notifies, when they are in
    the pool; what is said of pages above holds for both the pool's and the ring's.

    **Peers.** Commands for one peer take effect in the order of submission. `AddPeer` of a known
    peer with equal memories answers `PeerAdded` again and keeps its lease; with others, or after a
    break, the peer is forgotten first. An `AddPeer` that is forgotten before it was answered may
    stay without an answer. `PeerFailed` comes once when a peer cannot be added
    or once when its connection breaks; the peer is then forgotten without a `RemovePeer`, its
    posted writes end on their own, and `AddPeer` may bring it back. Where writes to a forgotten
    peer are still posted, a new `AddPeer` of it waits for their end. A peer that is restarted has
    a new incarnation and never waits.

    **Threads.** `submit` and `poll` are for one thread and never block. `wake` is called, on any
    thread, after something new became available to `poll`; it must not block or raise.
    """

    @property
    def memories(self) -> tuple[PeerMemory, ...]:
        """This side's registered pools, one of each rank, for the handshake. Constant."""
        ...

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to work; called once, before any `submit`."""
        ...

    def submit(self, commands: Sequence[TransferCommand]) -> None:
        """Hand over commands, in order. Never blocks. After `close`, writes fail at once."""
        ...

    def poll(self) -> list[TransferEvent]:
        """Everything new, oldest first. Never blocks; still answers after `close`."""
        ...

    def close(self) -> None:
        """End in bounded time. All unfinished writes get their events; then the pool is free.

        The exception is a post that the library does not return from: then no event comes, and the
        process has to end. Call this before anything that tells peers that this process is gone.
        """
        ...
