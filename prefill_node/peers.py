"""The decode nodes that a prefill node may write to, and until when."""

from dataclasses import dataclass, field

from common.messages import (
    Fingerprint,
    Incarnation,
    PeerHello,
    PeerMemory,
    PeerRefused,
    PeerWelcome,
    ToDecode,
)
from common.outbox import Outbox
from common.plan import AddPeer, RemovePeer, RenewLease
from transfer.handshake import memories_problem, mismatch


@dataclass(slots=True)
class DecodeLink:
    number: int
    """Decode's own number of this link."""
    memories: tuple[PeerMemory, ...]
    ready: bool = False
    lease_until: float = field(default=0.0)


class DecodeLinks:
    """Handshakes, leases and the set of linked decode incarnations.

    A link's lease runs from the moment this node *sent* the ping that decode last heard, so it ends
    here before decode, which counts from its own later answer, would take pages back without a
    word from here. The lease is the link's: a new link's pings do not renew what was named on an
    older one, because the backend forgets the peer, and with it the lease, in between.
    """

    def __init__(self, fingerprint: Fingerprint, head_bytes: int, outbox: Outbox) -> None:
        """`head_bytes`: what one KV head takes in a page, over all layers."""
        self._fingerprint = fingerprint
        self._head_bytes = head_bytes
        self._outbox = outbox
        self._links: dict[Incarnation, DecodeLink] = {}

    def supersedes(self, peer: Incarnation, number: int) -> bool:
        """Whether decode has ended the link that stands here, and opens this one."""
        link = self._links.get(peer)
        return link is not None and link.number < number

    def is_current(self, peer: Incarnation, number: int) -> bool:
        link = self._links.get(peer)
        return link is not None and link.number == number

    def on_hello(self, peer: Incarnation, number: int, hello: PeerHello) -> bool:
        """Answer a handshake; repeated ones are answered alike. False if a newer link stands.

        A superseded link has been removed.
        """
        problem = mismatch(self._fingerprint, hello.fingerprint) or memories_problem(
            hello.memories, self._fingerprint.num_kv_heads, self._head_bytes
        )
        if problem is not None:
            self._outbox.to_peer(peer, number, PeerRefused(reason=problem))
            return True
        link = self._links.get(peer)
        if link is not None and link.number > number:
            return False
        if link is None:
            self._links[peer] = DecodeLink(number, hello.memories)
            self._outbox.transfer(AddPeer(peer, hello.memories))
        elif link.ready:
            self.send(peer, PeerWelcome(fingerprint=self._fingerprint))
        return True

    def on_added(self, peer: Incarnation) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.ready = True
            self.send(peer, PeerWelcome(fingerprint=self._fingerprint))

    def remove(self, peer: Incarnation) -> bool:
        """Forget a link; says whether there was one.

        The peer is not told here: if it lives, its next message is answered with `PeerRefused`.
        """
        link = self._links.pop(peer, None)
        if link is None:
            return False
        self._outbox.transfer(RemovePeer(peer))
        self._outbox.hang_up(peer, link.number)
        return True

    def send(self, peer: Incarnation, body: ToDecode) -> None:
        """Over the link that stands; without one, decode asks again on the next (`Sync`)."""
        link = self._links.get(peer)
        if link is not None:
            self._outbox.to_peer(peer, link.number, body)

    def renew(self, peer: Incarnation, heard: float, lease_s: float) -> None:
        """Decode has echoed the ping this node sent at `heard` (this node's clock)."""
        link = self._links.get(peer)
        if link is not None and heard + lease_s > link.lease_until:
            link.lease_until = heard + lease_s
            self._outbox.transfer(RenewLease(peer, link.lease_until))

    def linked(self) -> list[Incarnation]:
        return list(self._links)

    def num_pages(self, peer: Incarnation) -> int | None:
        """How many pages the peer has, if it may be written to."""
        link = self._links.get(peer)
        return link.memories[0].num_pages if link is not None and link.ready else None
