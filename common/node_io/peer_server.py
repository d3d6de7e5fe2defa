"""Prefill's end of the side channel: one ROUTER socket that decode nodes dial."""

import time

import msgspec
import zmq

from common.events import FromPeer, PeerClosed
from common.messages import (
    Destination,
    Envelope,
    Incarnation,
    PeerBye,
    PeerHello,
    PeerRefused,
    Ping,
    Pong,
    ToDecode,
    ToPrefill,
    decode_to_prefill,
    encode,
)
from common.node_io.addresses import bind_host, bracketed
from common.node_io.peer_link import AcceptedPeers
from common.node_io.peer_side import Wiring
from common.node_io.settings import CannotBind, Registration
from common.node_io.sockets import FLUSH_MS, MessageSocket
from common.zmq_reading import Frames

BACKLOG = 1024
"""Connections that the kernel takes while this process is stopped: each try of each decode node
leaves one, and a full backlog would make the process look unreachable."""


class PeerServer:
    """Accepts decode nodes, pings them, and hands the engine what they say."""

    def __init__(self, port: int = 0) -> None:
        """`port` of the side channel; 0 takes a free one."""
        self._port = port
        self._socket: MessageSocket | None = None

    def open(self, wiring: Wiring) -> int | None:
        """Bind; returns the port. Raises CannotBind."""
        settings = wiring.settings
        self._node = wiring.node
        self._inbox = wiring.inbox
        self._tally = wiring.tally
        self._peers = AcceptedPeers(settings.peer_timeout_s)
        router = wiring.context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown id is an error, not a silent drop
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnect replaces its half-open predecessor
        router.setsockopt(zmq.BACKLOG, BACKLOG)
        self._socket = MessageSocket(router, self._receive)
        try:
            host = bind_host(settings.host)
            router.setsockopt(zmq.IPV6, int(":" in host))
            wiring.gate.guard(router)
            router.bind(f"tcp://{bracketed(host)}:{self._port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            where = f"{settings.host}:{self._port}"
            raise CannotBind(f"the side channel cannot listen at {where}: {error}") from error
        self._socket.start()
        return int(bytes(router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2])

    def register(self, registration: Registration) -> None:
        """Nothing to remember: the scheduler compares fingerprints."""

    # ------------------------------------------------------------ from the node

    def send(self, peer: Incarnation, link: int, body: ToPrefill | ToDecode) -> None:
        open_link = self._peers.get(peer)
        if open_link is None or open_link.number != link:
            self._tally.add("messages_to_unlinked_peers", type(body).__name__)
        else:
            self._say(open_link.routing_id, peer, open_link.numbers.next(), body)

    def _say(
        self, routing_id: bytes, peer: Incarnation, seq: int, body: ToPrefill | ToDecode
    ) -> None:
        envelope = Envelope(self._node, peer, seq, body)
        if self._socket is None or not self._socket.send([routing_id, encode(envelope)]):
            self._tally.add("dropped_peer_messages", type(body).__name__)

    def dial(self, peer: Incarnation, address: str, link: int) -> None:
        """A prefill node waits to be dialled."""
        self._tally.add("dials_refused", f"link {link} to {peer} at {address}")

    def probe(self, peer: Incarnation, address: str) -> None:
        """A prefill node sets no page aside, and asks nobody."""
        self._tally.add("probes_refused", f"{peer} at {address}")

    def hang_up(self, peer: Incarnation, link: int) -> None:
        """Without pings decode's lease is not renewed, and decode notices the silence."""
        self._peers.remove(peer, link)

    def tick(self, paused: bool) -> None:
        """Once every heartbeat: give up who is silent, ping who is not."""
        now = time.monotonic()
        for peer, link in self._peers.take_silent(now):
            self._tally.add("silent_peers", peer)
            self._inbox.put(PeerClosed(peer, link, "the peer is silent"))
        for peer in self._peers.linked():
            self._ping(peer, now, paused)

    def linked(self) -> list[Incarnation]:
        return self._peers.linked()

    def close(self, goodbye: bool) -> None:
        """The scheduler's `PeerBye`, which alone knows that all writes have ended, may still leave.
        Without one decode nodes learn of it from their routers, or from the silence."""
        if self._socket is not None:
            self._socket.close(FLUSH_MS if goodbye else 0)

    # ------------------------------------------------------------ from decode nodes

    def _receive(self, frames: Frames) -> None:
        try:
            routing_id, payload = frames
            envelope: Envelope[ToPrefill] = decode_to_prefill(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._tally.add("garbage_peer_frames", str(error))
            return
        peer, body, now = envelope.source, envelope.body, time.monotonic()
        if envelope.to != self._node or not peer:
            self._tally.add("stale_peer_messages", f"for {envelope.to!r}")
            self._refuse(routing_id, envelope, "another incarnation listens here")
            return
        if isinstance(body, Pong | Destination) and body.heard > now:
            self._tally.add("garbage_peer_frames", "a ping of the future was echoed")
            return
        if isinstance(body, PeerHello):
            link = self._peers.greet(peer, body.link, routing_id, now)
        else:
            link = self._peers.hear(peer, routing_id, now)
        if link is None:
            self._tally.add("stale_peer_messages", f"{peer} is not linked")
            self._refuse(routing_id, envelope, "not linked: shake hands again")
            return
        if link.numbers.gap(envelope.seq):
            self._tally.add("peer_sequence_gaps", peer)
        if isinstance(body, PeerHello):
            # Its echo is the first lease, so it must overtake the welcome that lets decode begin.
            self._ping(peer, now, paused=False)
        elif isinstance(body, PeerBye):
            self._peers.remove(peer, link.number)
        self._inbox.put(FromPeer(peer, link.number, body))

    def _ping(self, peer: Incarnation, now: float, paused: bool) -> None:
        link = self._peers.get(peer)
        if link is not None:
            self._say(link.routing_id, peer, link.numbers.next(), Ping(stamp=now, paused=paused))

    def _refuse(self, routing_id: bytes, envelope: Envelope[ToPrefill], reason: str) -> None:
        """Answer on the connection that a message came on. The sender's name in the answer tells
        decode that the one it looks for is gone; number 0 is outside any link's numbering."""
        if envelope.source and not isinstance(envelope.body, PeerBye):
            self._say(routing_id, envelope.source, 0, PeerRefused(reason=reason))
