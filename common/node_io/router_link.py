"""The life of one link to one router, without the socket.

                 Hello sent (seq 1)           Welcome
    greeting ───────────────────▶ greeting ───────────▶ linked(router) ──┐
       ▲   again every heartbeat, or 5 s after a Refused                 │
       └──── silent, numbering gap, new incarnation, connection broke ◀──┘

The rule that keeps both ends agreed: *a Hello says "I hold nothing of yours"*. A node greets only
when it is not linked, and whatever ended the link has reported `RouterLost` first, which ends all
of that router's rooms here; a router fails its attempts on a node that greets again. Numbering
restarts with each Hello on the way up and with each Welcome on the way down.
"""

from collections import deque
from dataclasses import dataclass

from common.messages import Envelope, Incarnation, Ping, Refused, ToNode, Welcome

REMEMBERED_INCARNATIONS = 8
REFUSED_RETRY_S = 5.0
"""Before a router that refused this node is asked again: the reason may have gone."""


@dataclass(frozen=True, slots=True)
class Received:
    """What one envelope means. At most one of `body`, `refused` and `dropped` is set."""

    body: ToNode | None = None
    """To be acted on, sent by the linked router."""
    lost: Incarnation | None = None
    """This router's rooms are over; comes before `body`."""
    dropped: str | None = None
    """Why the envelope was ignored: a counter's name."""
    refused: str | None = None
    """Why this router does not take this node now."""


class RouterLink:
    """State of one link: who is linked, what number comes next, when it was last heard."""

    def __init__(self, node: Incarnation, heartbeat_s: float, timeout_s: float) -> None:
        self._node = node
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._past: deque[Incarnation] = deque(maxlen=REMEMBERED_INCARNATIONS)
        self._last: Incarnation | None = None
        self._sent = 0
        self._expected = 0
        self._last_body: ToNode | None = None
        self._heard_at = 0.0
        self._greet_at = 0.0
        self.router: Incarnation | None = None
        """The linked router, or None while greeting."""
        self.parked_for: Incarnation | None = None
        """Another link reaches this router; greeting on both would reset it again and again."""

    # ------------------------------------------------------------ up

    def greeting_due(self, now: float) -> bool:
        return self.router is None and self.parked_for is None and now >= self._greet_at

    def greeted(self, now: float) -> None:
        """A Hello has left with number 1; the next is due in a heartbeat."""
        self._sent = 1
        self._greet_at = now + self._heartbeat_s

    def number(self) -> int:
        """The next message's number; every message takes one, also one that is then dropped."""
        self._sent += 1
        return self._sent

    # ------------------------------------------------------------ down

    def receive(self, envelope: Envelope[ToNode], now: float) -> Received:
        """Judge one envelope: addressee, sender, number."""
        source, body = envelope.source, envelope.body
        if envelope.to != self._node or not source or self.parked_for is not None:
            return Received(dropped="stale_router_messages")
        if isinstance(body, Welcome):
            return self._welcome(envelope, body, now)
        if isinstance(body, Refused):
            return self._refused(source, body, now)
        if source != self.router:
            if self.router is not None and isinstance(body, Ping) and source not in self._past:
                return Received(lost=self.lose())
            return Received(dropped="stale_router_messages")
        self._heard_at = now
        expected = self._expected
        if 0 < envelope.seq == expected - 1 and body == self._last_body:
            return Received(dropped="repeated_router_messages")
        self._expected, self._last_body = envelope.seq + 1, body
        if envelope.seq != expected:
            return Received(lost=self.lose(), dropped="router_sequence_gaps")
        return Received(body=body)

    def _welcome(self, envelope: Envelope[ToNode], body: Welcome, now: float) -> Received:
        """A welcome from an older incarnation counts too: one address may front several routers."""
        source = envelope.source
        lost = self.router if self.router != source else None
        if lost is None and body.reset:
            lost = source
        if self._last is not None and self._last != source:
            self._past.append(self._last)
        while source in self._past:
            self._past.remove(source)
        self.router = self._last = source
        self._last_body = None
        self._heard_at = now
        self._expected = envelope.seq + 1
        return Received(body=body, lost=lost)

    def _refused(self, source: Incarnation, body: Refused, now: float) -> Received:
        """An answer to a Hello; a router that was linked has changed its mind."""
        if self.router not in (None, source):
            return Received(dropped="stale_router_messages")
        lost = self.lose()
        self._greet_at = now + REFUSED_RETRY_S
        return Received(lost=lost, refused=body.reason)

    # ------------------------------------------------------------ losses

    def silent(self, now: float) -> bool:
        return self.router is not None and now - self._heard_at > self._timeout_s

    def lose(self) -> Incarnation | None:
        """End the link (None if there is none) and greet as soon as possible."""
        lost, self.router = self.router, None
        self._greet_at = 0.0
        return lost

    def connected(self) -> None:
        """The transport is up (again): greet now, whoever answers there this time."""
        self._greet_at = 0.0
        self.parked_for = None

    def park(self, router: Incarnation) -> None:
        """Stay quiet for as long as `router` is linked elsewhere."""
        self.router = None
        self.parked_for = router
