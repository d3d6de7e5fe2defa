"""The transfer contract over any one-sided write library: peers, leases, and each write's one end.

A poster writes from the pool of one rank into peers of one rank each; what has several is cut into
such peers and writes by `transfer.sharded`.

`Poster` is what the backends share. It knows no thread, clock or library of its own: commands go
in, `progress` asks the library how posted writes fare, events come out.

A peer's life here::

    AddPeer ──▶ known ──RemovePeer / break──▶ leaving ──last posted write ended──▶ forgotten
                  ▲                              │ commands that come meanwhile wait
                  └───────── they take effect ◀──┘ and start over with the forgotten peer

The library's side of a peer (connection, descriptor lists, metadata) is let go in one piece, and
only when none of its writes is posted: a library may free what a running write still uses. What
becomes of it then is `transfer.kept_peers`' business.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar, assert_never

from common.messages import Incarnation, PeerMemory
from common.plan import (
    AddPeer,
    ExpectWrites,
    Notified,
    PeerAdded,
    PeerFailed,
    RemovePeer,
    RenewLease,
    TransferCommand,
    TransferEvent,
    Write,
    WriteDone,
    WriteFailed,
)
from transfer.courier import refusals
from transfer.handshake import heads_of, memory_problem, write_problem
from transfer.kept_peers import KeptPeers

ASKED_PER_ROUND = 16
"""Posted writes asked after in one round, in turn: asking about one moves them all forward, and
each question takes the GIL from the forward pass."""

Handle = TypeVar("Handle")


def describe(error: Exception) -> str:
    """An exception as one line of an event."""
    return f"{type(error).__name__}: {error}"


class WriteState(Enum):
    """How a posted write fares; `BROKEN` and `LANDED` are final and free its handle."""

    POSTED = auto()
    LANDED = auto()
    BROKEN = auto()


class WriteAgent(Protocol[Handle]):
    """The primitives of a write library, used by one thread. What a method raises is a break."""

    def add_peer(self, memory: PeerMemory) -> None:
        """Make a pool writable; leaves nothing behind when it raises."""
        ...

    def remove_peer(self, memory: PeerMemory) -> None:
        """Drop all that `add_peer` made. Not called while a write to the peer is posted."""
        ...

    def post(self, memory: PeerMemory, write: Write) -> Handle:
        """Start a write; may block. Nothing is posted when it raises. An empty notification is
        none."""
        ...

    def notify(self, memory: PeerMemory, payload: bytes) -> None:
        """Send a notification that has no write, and no order."""
        ...

    def look(self, memory: PeerMemory, boxes: Sequence[int]) -> Handle:
        """Start to read words of a pool's boxes; nothing is posted when it raises."""
        ...

    def words(self, handle: Handle) -> Sequence[int]:
        """What a look that is `LANDED` has read; asked once, before the next `look`."""
        ...

    def state(self, handle: Handle) -> WriteState:
        """Ask once; not called again after a final answer."""
        ...

    def error(self, handle: Handle) -> str:
        """Why a write is `BROKEN`."""
        ...

    def notifications(self) -> list[bytes]:
        """Those that came since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class Look:
    """What stands in a peer's boxes (`transfer.boxes`)? It is in order with nothing."""

    peer: Incarnation
    boxes: tuple[int, ...]


@dataclass(slots=True)
class _Peer:
    memory: PeerMemory
    bytes_a_page: int
    """Of the heads that both pools hold."""
    lease_until: float | None = None
    num_posted: int = 0
    leaving: bool = False
    broken: bool = False
    waiting: list[TransferCommand] = field(default_factory=list)
    """An `AddPeer` that came while `leaving`, and what followed; handled when it is forgotten."""


@dataclass(slots=True)
class _Posted(Generic[Handle]):
    what: Write | Look
    peer: _Peer
    handle: Handle
    posted_at: float


class Poster(Generic[Handle]):
    """Keeps the contract of `transfer.base` on top of a `WriteAgent`; not thread-safe."""

    def __init__(
        self,
        agent: WriteAgent[Handle],
        memory: PeerMemory,
        clock: Callable[[], float],
    ) -> None:
        """`memory`: this rank's own."""
        self._agent = agent
        self._known = KeptPeers(agent)
        self._memory = memory
        self._head_bytes = memory.page_bytes // memory.num_heads
        self._clock = clock
        self._peers: dict[Incarnation, _Peer] = {}
        self._posted: deque[_Posted[Handle]] = deque()
        self._events: deque[TransferEvent] = deque()
        self._looks: list[tuple[Look, Sequence[int]]] = []
        self.expecting = False
        """Whether peers' writes into this side are due (`ExpectWrites`)."""

    @property
    def num_open(self) -> int:
        return len(self._posted)

    def take_events(self) -> list[TransferEvent]:
        """What happened since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    # ------------------------------------------------------------ commands

    def handle(self, command: TransferCommand) -> None:
        """Carry out one command; may block as long as the library's post does."""
        if isinstance(command, ExpectWrites):
            self.expecting = command.on
            return
        peer = self._peers.get(command.peer)
        if peer is not None and peer.leaving:
            if peer.waiting or isinstance(command, AddPeer):
                peer.waiting.append(command)
                return
            peer = None
        match command:
            case AddPeer():
                self._add(command, peer)
            case RemovePeer(incarnation):
                if peer is not None:
                    self._leave(incarnation, peer)
            case RenewLease(_, until):
                if peer is not None:
                    peer.lease_until = until
            case Write():
                self._write(command, peer)
            case _:
                assert_never(command)

    def _add(self, command: AddPeer, known: _Peer | None) -> None:
        if known is not None and (known.memory,) == command.memories:
            self._events.append(PeerAdded(command.peer))
            return
        if known is not None:
            known.waiting.append(command)
            self._leave(command.peer, known)
            return
        problem = self._problem(command.memories)
        if problem is None:
            try:
                self._known.add(command.memory)
            except Exception as error:  # whatever a foreign library says of foreign bytes
                problem = describe(error)
        if problem is not None:
            self._events.append(PeerFailed(command.peer, problem))
            return
        self._peers[command.peer] = _Peer(command.memory, self._bytes_a_page(command.memory))
        self._events.append(PeerAdded(command.peer))

    def _problem(self, memories: tuple[PeerMemory, ...]) -> str | None:
        """Why a peer with these pools cannot be added; None if it is the library's turn to say."""
        if len(memories) != 1:
            return f"{len(memories)} pools, where this rank writes to one"
        (memory,) = memories
        name = memory.agent_name
        if any(peer.memory.agent_name == name for peer in self._peers.values()):
            return f"agent name {name!r} belongs to another peer"
        problem = memory_problem(memory, self._head_bytes)
        if problem is None and not self._bytes_a_page(memory):
            return "no KV head in common"
        return problem

    def _bytes_a_page(self, memory: PeerMemory) -> int:
        """How much of each page goes into that pool: the heads that both hold."""
        heads = heads_of(self._memory).common(heads_of(memory))
        return 0 if heads is None else heads.count * self._head_bytes

    def _write(self, write: Write, peer: _Peer | None) -> None:
        if peer is None:
            self._fail(write, "the peer is unknown")
            return
        refusal = self._refusal(write, peer)
        if refusal is not None:
            self._fail(write, refusal)
            return
        self._post(write, peer, lambda: self._agent.post(peer.memory, write))

    def _post(self, what: Write | Look, peer: _Peer, start: Callable[[], Handle]) -> bool:
        """Whether it is posted; if not, the peer is lost."""
        posted_at = self._clock()
        try:
            handle = start()
        except Exception as error:
            if isinstance(what, Write):
                self._fail(what, describe(error))
            self._break(what.peer, peer, describe(error))
            return False
        peer.num_posted += 1
        self._posted.append(_Posted(what, peer, handle, posted_at))
        return True

    def _fail(self, write: Write, error: str) -> None:
        self._events.append(WriteFailed(write.room, write.chunk, error))

    def _refusal(self, write: Write, peer: _Peer) -> str | None:
        """Why nothing may be posted. The lease is read last: it is the one that runs out."""
        pages = self._memory.num_pages, peer.memory.num_pages
        problem = write_problem(write.source_pages, write.target_pages, *pages)
        if problem is not None:
            return problem
        if peer.lease_until is None or self._clock() >= peer.lease_until:
            return "the peer's lease is over"
        return None

    # ------------------------------------------------------------ progress

    def progress(self) -> None:
        """One round: how do the posted writes fare, and what did peers' writes bring?"""
        for _ in range(min(len(self._posted), ASKED_PER_ROUND)):
            posted = self._posted.popleft()
            if not self._ask(posted):
                self._posted.append(posted)
        self._events.extend(Notified(payload) for payload in self._agent.notifications())

    def _ask(self, posted: _Posted[Handle]) -> bool:
        """Whether the write ended; its event and its peer's are recorded."""
        state = self._agent.state(posted.handle)
        if state is WriteState.POSTED:
            return False
        what, peer = posted.what, posted.peer
        peer.num_posted -= 1
        if state is not WriteState.LANDED:
            error = self._agent.error(posted.handle)
            if isinstance(what, Write):
                self._fail(what, error)
            self._break(what.peer, peer, error)
            return True
        if isinstance(what, Write):
            num_bytes = len(what.source_pages) * peer.bytes_a_page
            seconds = self._clock() - posted.posted_at
            self._events.append(WriteDone(what.room, what.chunk, num_bytes, seconds))
        else:
            self._looks.append((what, self._agent.words(posted.handle)))
        if peer.leaving:
            self._forget_if_drained(what.peer, peer)
        return True

    def _break(self, incarnation: Incarnation, peer: _Peer, error: str) -> None:
        if not peer.leaving:
            self._events.append(PeerFailed(incarnation, error))
        peer.broken = True
        self._leave(incarnation, peer)

    def _leave(self, incarnation: Incarnation, peer: _Peer) -> None:
        peer.leaving = True
        self._forget_if_drained(incarnation, peer)

    def _forget_if_drained(self, incarnation: Incarnation, peer: _Peer) -> None:
        if peer.num_posted:
            return
        del self._peers[incarnation]
        self._known.leave(peer.memory, broken=peer.broken)
        for command in peer.waiting:
            self.handle(command)

    # ------------------------------------------------------------ for staging

    def may_post(self, name: Incarnation) -> bool:
        """Whether a write to this peer would be posted now."""
        peer = self._peers.get(name)
        if peer is None or peer.leaving or peer.lease_until is None:
            return False
        return self._clock() < peer.lease_until

    def notify(self, name: Incarnation, payload: bytes) -> None:
        """Send a notification that has no write; a peer that is gone gets none."""
        peer = self._peers.get(name)
        if peer is None or peer.leaving:
            return
        try:
            self._agent.notify(peer.memory, payload)
        except Exception as error:
            self._break(name, peer, describe(error))

    def look(self, look: Look) -> bool:
        """Begin to look; whether it was possible. What was seen comes in `take_looks`."""
        peer = self._peers.get(look.peer)
        if peer is None or peer.leaving:
            return False
        return self._post(look, peer, lambda: self._agent.look(peer.memory, look.boxes))

    def take_looks(self) -> list[tuple[Look, Sequence[int]]]:
        """The words that were read since the last call."""
        looks, self._looks = self._looks, []
        return looks

    # ------------------------------------------------------------ the end

    def stop(self, reason: str) -> None:
        """End what waits for a peer to leave."""
        for peer in self._peers.values():
            self._events += refusals(peer.waiting, reason)
            peer.waiting.clear()

    def abandon(self, reason: str) -> None:
        """End everything that has not ended, on the way to destroying the library's agent.

        The caller hands the events out only when that is done.
        """
        self._events += refusals(
            (p.what for p in self._posted if isinstance(p.what, Write)), reason
        )
        self.stop(reason)
        self._posted.clear()
        self._peers.clear()
