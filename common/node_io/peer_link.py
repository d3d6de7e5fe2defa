"""The life of one link between a decode and a prefill node, without the socket.

Decode dials and greets until it is answered; the side channel is level-triggered, so lost messages
are repeated by whoever needs the answer, and a gap in the numbers is counted and nothing else.
Liveness is mutual: prefill pings, decode echoes. The echo carries prefill's own clock back to it,
which is how prefill knows until when it may write.
"""

from dataclasses import dataclass, field

from common.messages import Incarnation


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

    def __init__(self, now: float, heartbeat_s: float, timeout_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._heard_at = now
        self._greet_at = now
        self.numbers = Numbering()
        self.answered = False
        self.stamp: float | None = None
        """Newest `Ping.stamp`: the peer's clock, opaque here."""
        self.was_paused = False

    def greeting_due(self, now: float) -> bool:
        """Whether to send (another) `PeerHello`; call once a tick."""
        if self.answered or now < self._greet_at:
            return False
        self._greet_at = now + self._heartbeat_s
        return True

    def heard(self, now: float) -> None:
        """Any message counts, also before the handshake is answered: a peer whose engine is busy
        for long (a first compile) pings, and is not dead."""
        self._heard_at = now

    def pinged(self, stamp: float, paused: bool) -> bool:
        """Take in a ping; whether the engine should see it (only pauses concern it)."""
        self.stamp = stamp if self.stamp is None else max(self.stamp, stamp)
        tell, self.was_paused = paused or self.was_paused, paused
        return tell

    def silent(self, now: float) -> bool:
        return now - self._heard_at > self._timeout_s


@dataclass(slots=True)
class AcceptedPeer:
    """A decode node as its prefill node sees it."""

    routing_id: bytes
    heard_at: float
    numbers: Numbering = field(default_factory=Numbering)


class AcceptedPeers:
    """The decode incarnations that have said `PeerHello` and neither left nor fell silent."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._peers: dict[Incarnation, AcceptedPeer] = {}

    def greet(self, peer: Incarnation, routing_id: bytes, now: float) -> AcceptedPeer:
        """Link `peer`, or move its link to the connection it greets on now."""
        link = self._peers.get(peer)
        if link is None or link.routing_id != routing_id:
            link = self._peers[peer] = AcceptedPeer(routing_id, now)
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

    def remove(self, peer: Incarnation) -> bool:
        """Unlink; whether there was a link."""
        return self._peers.pop(peer, None) is not None

    def take_silent(self, now: float) -> list[Incarnation]:
        """Unlink and return all whose time-out has passed."""
        silent = [p for p, link in self._peers.items() if now - link.heard_at > self._timeout_s]
        for peer in silent:
            del self._peers[peer]
        return silent

    def linked(self) -> list[Incarnation]:
        return list(self._peers)
