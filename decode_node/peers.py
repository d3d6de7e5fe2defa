"""The prefill nodes that a decode node has dialled."""

from dataclasses import dataclass

from common.messages import Incarnation
from common.outbox import Outbox


@dataclass(slots=True)
class PrefillLink:
    ready: bool = False
    paused_since: float | None = None
    next_sync: float = 0.0


class PrefillLinks:
    """One link per prefill incarnation, dialled when a request first names it."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._links: dict[Incarnation, PrefillLink] = {}

    def want(self, peer: Incarnation, address: str) -> bool:
        """Whether pages may be named to `peer`; dials it if nobody has."""
        link = self._links.get(peer)
        if link is None:
            self._links[peer] = PrefillLink()
            self._outbox.dial(peer, address)
            return False
        return link.ready

    def on_welcome(self, peer: Incarnation) -> bool:
        """The handshake succeeded; False if nobody is waiting for it."""
        link = self._links.get(peer)
        if link is None:
            return False
        link.ready = True
        link.next_sync = 0.0
        return True

    def remove(self, peer: Incarnation) -> bool:
        if self._links.pop(peer, None) is None:
            return False
        self._outbox.hang_up(peer)
        return True

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
        link = self._links.get(peer)
        if link is None:
            return 0.0
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
