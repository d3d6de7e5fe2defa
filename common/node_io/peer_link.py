"""The life of one link between a decode and a prefill node, without the socket.

Decode dials and greets until it is answered; the side channel is level-triggered, so lost messages
are repeated by whoever needs the answer, and a gap in the numbers is counted and nothing else.
Liveness is mutual: prefill pings, decode echoes. The echo carries prefill's own clock back to it,
which is how prefill knows until when it may write.

Decode numbers its links, each with a number larger than all before it; a greeting that is overtaken
by the next link's is known by it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from common.messages import Incarnation

DOUBT_HEARTBEATS = 1.5
"""Silence after which decode asks a peer's kernel, and greets again."""
REMEMBERED_LINKS = 4096
"""Decode incarnations whose newest link's number is kept."""


@dataclass(slots=True)
class Numbering:
    """Both directions' message numbers on one link."""

    sent: int = 0
    expected: int | None = None
    """None before the first message."""

    def next(self) -> int:
        self.sent += 1
        return self.sent

    def gap(self, seq: int) -> bool:
        """Take in a received number; whether messages were lost before it."""
        expected, self.expected = self.expected, seq + 1
        return expected is not None and seq != expected


class DialledPeer:
    """A prefill node as its decode node sees it."""

    def __init__(self, link: int, now: float, heartbeat_s: float, timeout_s: float) -> None:
        self.number = link
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._heard_at = now
        self._spoke = False
        self._greet_at = now
        self.probing = False
        """Its kernel is being asked."""
        self.numbers = Numbering()
        self.answered = False
        self.stamp: float | None = None
        """Newest `Ping.stamp`: the peer's clock, opaque here."""
        self.was_paused = False

    def greeting_due(self, now: float) -> bool:
        """Whether to send (another) `PeerHello`; call once a tick."""
        if now < self._greet_at or (self.answered and not self.doubtful(now)):
            return False
        self._greet_at = now + self._heartbeat_s
        return True

    def heard(self, now: float) -> None:
        """Any message counts, also before the handshake is answered: a peer whose engine is busy
        for long (a first compile) pings, and is not dead."""
        self._heard_at = now
        self._spoke = True

    def pinged(self, stamp: float, paused: bool) -> bool:
        """Take in a ping; whether the engine should see it (only pauses concern it)."""
        self.stamp = stamp if self.stamp is None else max(self.stamp, stamp)
        tell, self.was_paused = paused or self.was_paused, paused
        return tell

    def silent(self, now: float) -> bool:
        return now - self._heard_at > self._timeout_s

    def doubtful(self, now: float) -> bool:
        """A ping is missing: perhaps the peer has ended, or another process is in its place."""
        return now - self._heard_at > DOUBT_HEARTBEATS * self._heartbeat_s

    def silent_s(self, now: float) -> float | None:
        """Since the peer's last word; None if it said none."""
        return now - self._heard_at if self._spoke else None


@dataclass(slots=True)
class AcceptedPeer:
    """A decode node as its prefill node sees it."""

    number: int
    routing_id: bytes
    heard_at: float
    numbers: Numbering = field(default_factory=Numbering)


class AcceptedPeers:
    """The decode incarnations that have said `PeerHello` and neither left nor fell silent."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._peers: dict[Incarnation, AcceptedPeer] = {}
        self._newest: OrderedDict[Incarnation, int] = OrderedDict()

    def greet(
        self, peer: Incarnation, number: int, routing_id: bytes, now: float
    ) -> AcceptedPeer | None:
        """Link `peer` on the connection that it greets on; None if it has opened a newer link."""
        if number < self._newest.get(peer, number):
            return None
        self._newest[peer] = number
        self._newest.move_to_end(peer)
        if len(self._newest) > REMEMBERED_LINKS:
            self._newest.popitem(last=False)
        link = self._peers.get(peer)
        if link is None or (link.number, link.routing_id) != (number, routing_id):
            link = self._peers[peer] = AcceptedPeer(number, routing_id, now)
        link.heard_at = now
        return link

    def hear(self, peer: Incarnation, routing_id: bytes, now: float) -> AcceptedPeer | None:
        """The link a message belongs to; None if it came over no link, or over an older one."""
        link = self._peers.get(peer)
        if link is None or link.routing_id != routing_id:
            return None
        link.heard_at = now
        return link

    def get(self, peer: Incarnation) -> AcceptedPeer | None:
        return self._peers.get(peer)

    def remove(self, peer: Incarnation, number: int) -> bool:
        """Unlink; whether it was this link."""
        link = self._peers.get(peer)
        if link is None or link.number != number:
            return False
        del self._peers[peer]
        return True

    def take_silent(self, now: float) -> list[tuple[Incarnation, int]]:
        """Unlink all whose time-out has passed; returns them with their links' numbers."""
        silent = [
            (peer, link.number)
            for peer, link in self._peers.items()
            if now - link.heard_at > self._timeout_s
        ]
        for peer, _ in silent:
            del self._peers[peer]
        return silent

    def linked(self) -> list[Incarnation]:
        return list(self._peers)
