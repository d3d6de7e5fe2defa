"""One transfer backend over those of a node's ranks.

    Write ──▶ one for each pair of ranks with heads in common ──▶ the source ranks' backends
                                                                        │ (each posts its own)
    WriteDone / WriteFailed ◀── once all of them have ended ◀───────────┘
    Notified ◀── once every piece of the notification is here ◀── the target ranks' backends

A rank's backend writes to peers of one rank, so a rank of a peer is a peer of its own down there: a
*leg*, from one of our ranks to one of theirs. What is above sees no ranks at all, neither its own
nor those of a peer. Nothing here needs a thread: everything is done inside `submit` and `poll`.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from common.messages import Incarnation, PeerMemory, Room
from common.plan import (
    AddPeer,
    ExpectWrites,
    Notified,
    PeerAdded,
    PeerFailed,
    PieceLanded,
    PiecesDropped,
    RemovePeer,
    RenewLease,
    TransferCommand,
    TransferEvent,
    Write,
    WriteDone,
    WriteFailed,
)
from transfer.base import TransferBackend
from transfer.handshake import heads_of, memories_problem
from transfer.head_ranges import cut
from transfer.pieces import PieceGatherer, wrapped

Outgoing = list[list[TransferCommand]]
"""By our rank, what its backend is given in this `submit`."""


@dataclass(frozen=True, slots=True)
class Leg:
    """From one of our ranks to a peer's rank, which is the peer `name` down there."""

    rank: int
    name: Incarnation
    memory: PeerMemory


@dataclass(slots=True)
class _Peer:
    memories: tuple[PeerMemory, ...]
    legs: tuple[Leg, ...]
    """Piece `i` of each write takes leg `i`."""
    asked: int = 0
    """`AddPeer`s that each leg was given."""
    said: int = 0
    """Of these, those answered with `PeerAdded`."""
    answers: Counter[Leg] = field(default_factory=Counter)


@dataclass(slots=True)
class _OpenWrite:
    """A write of which some legs have not ended."""

    num_open: int
    num_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


class ShardedTransfer:
    """A `TransferBackend` made of one for each rank of this node, in the order of ranks.

    `incarnation` is this node's. Raises ValueError where the ranks' pools make no whole model.
    """

    def __init__(self, backends: Sequence[TransferBackend], incarnation: Incarnation) -> None:
        self._backends = tuple(backends)
        self._incarnation = incarnation
        self._memories = tuple(memory for backend in backends for memory in backend.memories)
        self._heads = [heads_of(memory) for memory in self._memories]
        self._num_kv_heads = max(heads.end for heads in self._heads)
        self._head_bytes = self._memories[0].page_bytes // self._memories[0].num_heads
        problem = memories_problem(self._memories, self._num_kv_heads, self._head_bytes)
        if problem is not None:
            raise ValueError(problem)
        self._peers: dict[Incarnation, _Peer] = {}
        self._legs: dict[tuple[int, Incarnation], tuple[Incarnation, Leg]] = {}
        """(our rank, name down there) -> the known peer whose leg that is."""
        self._owed: Counter[tuple[int, Incarnation]] = Counter()
        """Answers to `AddPeer`s of peers that have been forgotten since."""
        self._writes: dict[tuple[Room, int], _OpenWrite] = {}
        """Those of several legs; the end of one of one leg is told as it comes."""
        self._gatherer = PieceGatherer()
        self._events: deque[TransferEvent] = deque()
        self._wake: Callable[[], None] = _nobody

    @property
    def memories(self) -> tuple[PeerMemory, ...]:
        return self._memories

    def start(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        for backend in self._backends:
            backend.start(wake)

    def close(self) -> None:
        """All at the same time, so that it takes no longer than one."""
        closing = [
            threading.Thread(target=backend.close, name="closing", daemon=True)
            for backend in self._backends[1:]
        ]
        for thread in closing:
            thread.start()
        self._backends[0].close()
        for thread in closing:
            thread.join()

    # ------------------------------------------------------------ commands

    def submit(self, commands: Sequence[TransferCommand]) -> None:
        outgoing: Outgoing = [[] for _ in self._backends]
        for command in commands:
            match command:
                case Write():
                    self._write(command, outgoing)
                case RenewLease(peer):
                    for leg in self._legs_of(peer):
                        outgoing[leg.rank].append(replace(command, peer=leg.name))
                case AddPeer():
                    self._add(command, outgoing)
                case RemovePeer(peer):
                    self._forget(peer, outgoing)
                    self._events.extend(self._gatherer.forget(peer))
                case ExpectWrites():
                    for queue in outgoing:
                        queue.append(command)
                case _:
                    assert_never(command)
        self._hand_out(outgoing)
        if self._events:
            self._wake()

    def _hand_out(self, outgoing: Outgoing) -> None:
        for backend, queue in zip(self._backends, outgoing, strict=True):
            if queue:
                backend.submit(queue)

    def _legs_of(self, peer: Incarnation) -> tuple[Leg, ...]:
        known = self._peers.get(peer)
        return () if known is None else known.legs

    def _write(self, write: Write, outgoing: Outgoing) -> None:
        legs = self._legs_of(write.peer)
        if not legs:
            self._events.append(WriteFailed(write.room, write.chunk, "the peer is unknown"))
            return
        if len(legs) == 1:
            outgoing[legs[0].rank].append(write)
            return
        key = write.room, write.chunk
        assert key not in self._writes, f"chunk {key} is being written already"
        self._writes[key] = _OpenWrite(len(legs))
        for index, leg in enumerate(legs):
            payload = wrapped(write.notification, index, len(legs), self._incarnation)
            outgoing[leg.rank].append(replace(write, peer=leg.name, notification=payload))

    def _add(self, command: AddPeer, outgoing: Outgoing) -> None:
        peer = self._peers.get(command.peer)
        if peer is not None and peer.memories != command.memories:
            self._forget(command.peer, outgoing)
            peer = None
        if peer is None:
            memories = command.memories
            problem = memories_problem(memories, self._num_kv_heads, self._head_bytes)
            legs = () if problem is not None else self._legs_to(command.peer, memories)
            if any((leg.rank, leg.name) in self._legs for leg in legs):
                problem = "its name belongs to a rank of another peer"
            if problem is not None:
                self._events.append(PeerFailed(command.peer, problem))
                return
            peer = self._peers[command.peer] = _Peer(memories, legs)
            self._legs.update({(leg.rank, leg.name): (command.peer, leg) for leg in legs})
        peer.asked += 1
        for leg in peer.legs:
            outgoing[leg.rank].append(AddPeer(leg.name, (leg.memory,)))

    def _legs_to(self, name: Incarnation, memories: tuple[PeerMemory, ...]) -> tuple[Leg, ...]:
        pieces = cut(self._heads, [heads_of(memory) for memory in memories])
        whole = len(pieces) == 1
        return tuple(
            Leg(piece.source, name if whole else f"{name}/{piece.target}", memories[piece.target])
            for piece in pieces
        )

    def _forget(self, name: Incarnation, outgoing: Outgoing) -> None:
        """Whatever of it is still to be answered, concerns nobody any more."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        for leg in peer.legs:
            key = leg.rank, leg.name
            del self._legs[key]
            self._owed[key] += peer.asked - peer.answers[leg]
            outgoing[leg.rank].append(RemovePeer(leg.name))

    # ------------------------------------------------------------ events

    def poll(self) -> list[TransferEvent]:
        for rank, backend in enumerate(self._backends):
            for event in backend.poll():
                self._take(rank, event)
        events = list(self._events)
        self._events.clear()
        return events

    def _take(self, rank: int, event: TransferEvent) -> None:
        match event:
            case WriteDone() | WriteFailed():
                self._on_ended(event)
            case Notified(payload):
                self._events.extend(self._gatherer.take(payload))
            case PeerAdded(name):
                self._on_added(rank, name)
            case PeerFailed(name, error):
                self._on_failed(rank, name, error)
            case PieceLanded() | PiecesDropped():
                raise AssertionError("a rank's backend puts nothing together")
            case _:
                assert_never(event)

    def _on_ended(self, event: WriteDone | WriteFailed) -> None:
        key = event.room, event.chunk
        write = self._writes.get(key)
        if write is None:
            self._events.append(event)
            return
        write.num_open -= 1
        if isinstance(event, WriteFailed):
            write.error = write.error or event.error
        else:
            write.num_bytes += event.num_bytes
            write.seconds = max(write.seconds, event.seconds)
        if write.num_open:
            return
        del self._writes[key]
        if write.error is None:
            self._events.append(WriteDone(*key, write.num_bytes, write.seconds))
        else:
            self._events.append(WriteFailed(*key, write.error))

    def _is_owed(self, key: tuple[int, Incarnation]) -> bool:
        """Whether an answer is for a peer that has been forgotten since; it is taken off then.

        A break that a rank noticed before it heard of that may be taken for the answer, and the
        answer for one of the peer that came after: it is then said to be added, or to have failed,
        a little early. Ranks obey in order, so nothing is written meanwhile that should not be.
        """
        if not self._owed[key]:
            del self._owed[key]
            return False
        self._owed[key] -= 1
        return True

    def _on_added(self, rank: int, name: Incarnation) -> None:
        found = None if self._is_owed((rank, name)) else self._legs.get((rank, name))
        if found is None:
            return
        owner, leg = found
        peer = self._peers[owner]
        peer.answers[leg] = min(peer.answers[leg] + 1, peer.asked)
        if min(peer.answers[leg] for leg in peer.legs) > peer.said:
            peer.said += 1
            self._events.append(PeerAdded(owner))

    def _on_failed(self, rank: int, name: Incarnation, error: str) -> None:
        """One leg is enough to lose a peer. Its writes end on their own."""
        found = None if self._is_owed((rank, name)) else self._legs.get((rank, name))
        if found is None:
            return
        owner, leg = found
        peer = self._peers[owner]
        peer.answers[leg] = min(peer.answers[leg] + 1, peer.asked)
        outgoing: Outgoing = [[] for _ in self._backends]
        self._forget(owner, outgoing)
        self._hand_out(outgoing)
        self._events.append(PeerFailed(owner, error))


def _nobody() -> None:
    """Who is woken before `start`."""
