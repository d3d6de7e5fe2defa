"""The prefill nodes that a decode node has dialled.

    (none) ─want─▶ dialled ─welcome─▶ ready ─close─▶ closing ─▶ (none)
                      └────── the I/O thread ends it ───────────▶ (none)

Every link has a number of its own, larger than those of all links before it, and events name it: a
word of an older link, still on its way to the engine when the peer is dialled anew, is known for
what it is. A link is over only when the I/O thread says so (`PeerClosed`); until then the peer is
not dialled again.
"""

from dataclasses import dataclass

from common.messages import Incarnation, ToPrefill
from common.outbox import Outbox
from common.plan import RemovePeer


@dataclass(slots=True)
class PrefillLink:
    number: int
    ready: bool = False
    closing: bool = False
    paused_since: float | None = None
    next_sync: float = 0.0


class PrefillLinks:
    """At most one link per prefill incarnation, dialled when somebody wants it."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._links: dict[Incarnation, PrefillLink] = {}
        self._dials = 0

    def want(self, peer: Incarnation, address: str) -> bool:
        """Whether pages may be named to `peer`; dials it if it has no link."""
        link = self._links.get(peer)
        if link is None:
            self._dials += 1
            self._links[peer] = PrefillLink(self._dials)
            self._outbox.dial(peer, address, self._dials)
            return False
        return link.ready

    def is_current(self, peer: Incarnation, number: int) -> bool:
        """Whether an event of this link still counts: what a closing link says does not."""
        link = self._links.get(peer)
        return link is not None and link.number == number and not link.closing

    def on_welcome(self, peer: Incarnation) -> None:
        """The handshake succeeded, perhaps again."""
        link = self._links[peer]
        link.ready = True
        link.next_sync = 0.0

    def close(self, peer: Incarnation) -> bool:
        """Hang up; whether that was news. The link is over when `PeerClosed` comes."""
        link = self._links.get(peer)
        if link is None or link.closing:
            return False
        link.ready, link.closing = False, True
        self._outbox.hang_up(peer, link.number)
        return True

    def on_closed(self, peer: Incarnation, number: int) -> bool:
        """The I/O thread has closed a link; False if it is not the one that this class knows."""
        link = self._links.get(peer)
        if link is None or link.number != number:
            return False
        del self._links[peer]
        return True

    def forget_pieces(self, peer: Incarnation) -> None:
        """No write of `peer` that has come in part will be completed for a room that waits."""
        self._outbox.transfer(RemovePeer(peer))

    def send(self, peer: Incarnation, body: ToPrefill) -> None:
        """Over the peer's link, if it is ready; `Sync` repeats what matters on the next one."""
        link = self._links.get(peer)
        if link is not None and link.ready:
            self._outbox.to_peer(peer, link.number, body)

    def ready(self, peer: Incarnation) -> bool:
        link = self._links.get(peer)
        return link is not None and link.ready

    def linked(self) -> list[Incarnation]:
        """Those with which the handshake is done."""
        return [peer for peer, link in self._links.items() if link.ready]

    def paused(self, peer: Incarnation) -> bool:
        link = self._links.get(peer)
        return link is not None and link.paused_since is not None

    def on_ping(self, peer: Incarnation, paused: bool, now: float) -> float:
        """Take in the peer's own word; returns for how long it was paused, once it no longer is."""
        link = self._links[peer]
        if paused:
            link.paused_since = now if link.paused_since is None else link.paused_since
            return 0.0
        since, link.paused_since = link.paused_since, None
        return 0.0 if since is None else now - since

    def due_for_sync(self, now: float, every_s: float) -> list[Incarnation]:
        due = [p for p, link in self._links.items() if link.ready and link.next_sync <= now]
        for peer in due:
            self._links[peer].next_sync = now + every_s
        return due
