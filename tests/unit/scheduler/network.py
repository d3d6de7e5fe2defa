"""The side channel of the virtual cluster: links, pings, probes, and what a network does to them.

It loses, repeats and reorders; a pair of nodes can be cut off from each other; a process that is
stopped hears and says nothing, while its kernel takes connections. A link that the engine hangs up
lives a little longer, as the I/O thread of a real node comes to it later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.events import FromPeer, PeerClosed, PeerProbed, Reach
from common.messages import (
    Incarnation,
    PeerBye,
    PeerHello,
    PeerMemory,
    PeerRefused,
    PeerWelcome,
    Ping,
    Pong,
)
from common.plan import DialPeer, HangUp, ProbePeer, ToPeerMsg

if TYPE_CHECKING:
    from tests.unit.scheduler.world import World

PEER_TIMEOUT_S = 2.0
LONGEST_CLOSING_S = 0.5


@dataclass
class Dial:
    """Decode's end of a link."""

    link: int
    since: float
    heard: float | None = None
    welcomed: bool = False
    closing_at: float = float("inf")


@dataclass
class Accepted:
    """Prefill's end of a link."""

    link: int
    heard: float


@dataclass
class Frame:
    source: Incarnation
    target: Incarnation
    link: int
    body: Any


class Network:
    """All side channels of a `World`."""

    def __init__(self, world: World, loss: float, repeat: float, reorder: bool) -> None:
        self.world = world
        self.loss, self.repeat, self.reorder = loss, repeat, reorder
        self.wire: list[Frame] = []
        self.dialled: dict[tuple[Incarnation, Incarnation], Dial] = {}
        """(decode, prefill) -> decode's end."""
        self.accepted: dict[tuple[Incarnation, Incarnation], Accepted] = {}
        """(decode, prefill) -> prefill's end."""
        self.newest: dict[tuple[Incarnation, Incarnation], int] = {}
        self.probes: list[tuple[float, Incarnation, Incarnation]] = []
        self.cuts: dict[frozenset[Incarnation], float] = {}

    def heal(self) -> None:
        self.loss = self.repeat = 0.0
        self.cuts.clear()

    def is_cut(self, one: Incarnation, other: Incarnation) -> bool:
        return self.cuts.get(frozenset((one, other)), 0.0) > self.world.now

    def forget(self, name: Incarnation) -> None:
        """A process has ended."""
        self.dialled = {pair: dial for pair, dial in self.dialled.items() if pair[0] != name}
        self.accepted = {pair: end for pair, end in self.accepted.items() if name not in pair}

    # ------------------------------------------------------------ orders of the engines

    def carry_out(
        self, name: Incarnation, order: ToPeerMsg | DialPeer | HangUp | ProbePeer
    ) -> None:
        match order:
            case ToPeerMsg(peer, link, body):
                self._post(Frame(name, peer, link, body))
            case DialPeer(peer, _, link):
                assert (name, peer) not in self.dialled, "dialled while a link stands"
                self.dialled[name, peer] = Dial(link, self.world.now)
            case HangUp(peer, link):
                self._hang_up(name, peer, link)
            case ProbePeer(peer, _):
                due = self.world.now + self.world.random.uniform(0, 1)
                self.probes.append((due, name, peer))

    def _hang_up(self, name: Incarnation, peer: Incarnation, link: int) -> None:
        dial = self.dialled.get((name, peer))
        if dial is not None and dial.link == link:
            dial.closing_at = self.world.now + self.world.random.uniform(0, LONGEST_CLOSING_S)
        accepted = self.accepted.get((peer, name))
        if accepted is not None and accepted.link == link:
            del self.accepted[peer, name]

    def _post(self, frame: Frame) -> None:
        chance = self.world.random
        copies = 0 if chance.random() < self.loss else 1
        copies += chance.random() < self.repeat
        self.wire += [frame] * copies

    # ------------------------------------------------------------ the I/O threads

    def beat(self) -> None:
        """One heartbeat of every node that is not stopped."""
        for (d, p), dial in list(self.dialled.items()):
            if self.world.runs(d):
                self._beat_decode(d, p, dial)
        for (d, p), accepted in list(self.accepted.items()):
            if self.world.runs(p) and self.world.now - accepted.heard > PEER_TIMEOUT_S:
                del self.accepted[d, p]
                self._tell(p, PeerClosed(d, accepted.link, "the peer is silent"))
        for probe in [probe for probe in self.probes if probe[0] <= self.world.now]:
            self.probes.remove(probe)
            _, d, p = probe
            self._tell(d, PeerProbed(p, self._reach(d, p)))

    def _reach(self, d: Incarnation, p: Incarnation) -> Reach:
        if self.is_cut(d, p):
            return Reach.UNREACHABLE
        return Reach.LISTENING if p in self.world.nodes else Reach.GONE

    def _beat_decode(self, d: Incarnation, p: Incarnation, dial: Dial) -> None:
        now = self.world.now
        reachable = self.world.runs(p) and not self.is_cut(d, p)
        if reachable and not dial.welcomed:
            memory = self.world.memory_of(d)
            fingerprint = self.world.nodes[d].scheduler.settings.fingerprint
            hello = PeerHello(
                fingerprint=fingerprint,
                memories=(memory,),
                lease_s=self.world.lease_s,
                link=dial.link,
            )
            self._post(Frame(d, p, dial.link, hello))
        accepted = self.accepted.get((d, p))
        if reachable and accepted is not None and accepted.link == dial.link:
            dial.heard = accepted.heard = now
            paused = self.world.nodes[p].scheduler.paused is not None
            self._tell(d, FromPeer(p, dial.link, Ping(now, paused)))
            pong = Pong(heard=now, lease_s=self.world.lease_s)
            self._tell(p, FromPeer(d, dial.link, pong))
        if dial.closing_at <= now:
            self._post(Frame(d, p, dial.link, PeerBye()))
            self._close(d, p, dial, "hung up")
        elif now - (dial.since if dial.heard is None else dial.heard) > PEER_TIMEOUT_S:
            self._close(d, p, dial, "the peer is silent")
        elif p not in self.world.nodes and self.world.random.random() < 0.2:
            gone = not self.is_cut(d, p)
            if gone:
                self._close(d, p, dial, "nobody listens at its address", gone=True)

    def _close(
        self, d: Incarnation, p: Incarnation, dial: Dial, why: str, *, gone: bool = False
    ) -> None:
        del self.dialled[d, p]
        silent_s = None if dial.heard is None else self.world.now - dial.heard
        self._tell(d, PeerClosed(p, dial.link, why, silent_s=silent_s, gone=gone))

    def _tell(self, name: Incarnation, fact: Any) -> None:
        node = self.world.nodes.get(name)
        if node is not None:
            node.facts.append(fact)

    # ------------------------------------------------------------ delivery

    def deliver(self) -> None:
        """Hand over what is on the wire; what a stopped process gets, it gets later."""
        if self.reorder:
            self.world.random.shuffle(self.wire)
        due, self.wire = self.wire, []
        for frame in due:
            if frame.target not in self.world.nodes or self.is_cut(frame.source, frame.target):
                continue
            if not self.world.runs(frame.target):
                self.wire.append(frame)
            elif frame.target.startswith("p"):
                self._to_prefill(frame)
            else:
                self._to_decode(frame)

    def _to_decode(self, frame: Frame) -> None:
        dial = self.dialled.get((frame.target, frame.source))
        if dial is None or dial.link != frame.link:
            return
        dial.heard = self.world.now
        if isinstance(frame.body, PeerWelcome):
            dial.welcomed = True
        self._tell(frame.target, FromPeer(frame.source, frame.link, frame.body))

    def _to_prefill(self, frame: Frame) -> None:
        d, p, body = frame.source, frame.target, frame.body
        accepted = self.accepted.get((d, p))
        if isinstance(body, PeerHello) and frame.link >= self.newest.get((d, p), 0):
            self.newest[d, p] = frame.link
            self.accepted[d, p] = Accepted(frame.link, self.world.now)
        elif accepted is None or accepted.link != frame.link:
            if not isinstance(body, PeerBye):
                self._post(Frame(p, d, frame.link, PeerRefused(reason="not linked")))
            return
        elif isinstance(body, PeerBye):
            del self.accepted[d, p]
        else:
            accepted.heard = self.world.now
        self._tell(p, FromPeer(d, frame.link, body))


def memory(name: Incarnation, num_pages: int, page_bytes: int) -> PeerMemory:
    return PeerMemory(
        agent_name=name,
        metadata=b"m",
        base_address=4096,
        num_pages=num_pages,
        page_bytes=page_bytes,
        first_head=0,
        num_heads=1,
    )
