"""Decode's end of the side channel: one DEALER socket for each prefill incarnation in use."""

import functools
import time

import msgspec
import zmq

from common.events import FromPeer, PeerSilent
from common.gatekeeper import dial_with, why_refused
from common.messages import (
    Destination,
    Envelope,
    Incarnation,
    PeerBye,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    Ping,
    Pong,
    ToDecode,
    ToPrefill,
    decode_to_decode,
    encode,
)
from common.node_io.addresses import Endpoint
from common.node_io.peer_link import DialledPeer
from common.node_io.peer_side import Wiring
from common.node_io.settings import Registration
from common.node_io.sockets import FLUSH_MS, MessageSocket, routing_id
from common.zmq_reading import Frames


class Dialled:
    """A `DialledPeer` and the socket it lives on."""

    def __init__(self, socket: MessageSocket, link: DialledPeer) -> None:
        self.socket = socket
        self.link = link


class PeerDialler:
    """Dials prefill nodes, greets until answered, and echoes their pings."""

    def __init__(self, lease_s: float) -> None:
        """`lease_s`: how long after an echoed ping prefill may still post writes into this node."""
        self._lease_s = lease_s
        self._registration: Registration | None = None
        self._peers: dict[Incarnation, Dialled] = {}

    def open(self, wiring: Wiring) -> int | None:
        """A decode node listens nowhere."""
        self._node = wiring.node
        self._settings = wiring.settings
        self._context = wiring.context
        self._inbox = wiring.inbox
        self._tally = wiring.tally
        return None

    def register(self, registration: Registration) -> None:
        """What to say in the handshake."""
        self._registration = registration

    # ------------------------------------------------------------ from the node

    def dial(self, peer: Incarnation, address: str) -> None:
        """Connect and greet. An address that makes no sense is a peer that cannot be reached."""
        if peer in self._peers:
            return
        try:
            endpoint = Endpoint.parse(address)
        except ValueError as error:
            self._tally.add("bad_peer_addresses", str(error))
            self._inbox.put(PeerSilent(peer))
            return
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, routing_id(self._node))
        dealer.setsockopt(zmq.IPV6, int(endpoint.is_ipv6))
        dial_with(dealer, self._settings.keys)
        socket = MessageSocket(dealer, functools.partial(self._receive, peer))
        socket.watch_connections(refused=functools.partial(self._refused, address))
        dealer.connect(str(endpoint))
        socket.start()
        settings = self._settings
        link = DialledPeer(time.monotonic(), settings.heartbeat_s, settings.peer_timeout_s)
        self._peers[peer] = Dialled(socket, link)
        self._greet(peer, link, time.monotonic())

    def send(self, peer: Incarnation, body: ToPrefill | ToDecode) -> None:
        """A `Destination` takes the newest ping with it: naming pages renews their lease."""
        dialled = self._peers.get(peer)
        if dialled is None:
            self._tally.add("messages_to_unlinked_peers", type(body).__name__)
            return
        if isinstance(body, Destination) and dialled.link.stamp is not None:
            stamp, lease_s = dialled.link.stamp, self._lease_s
            body = msgspec.structs.replace(body, heard=stamp, lease_s=lease_s)
        envelope = Envelope(self._node, peer, dialled.link.numbers.next(), body)
        if not dialled.socket.send([encode(envelope)]):
            self._tally.add("dropped_peer_messages", type(body).__name__)

    def hang_up(self, peer: Incarnation) -> None:
        """Say goodbye and close; from here on no ping of this peer is echoed."""
        if peer in self._peers:
            self.send(peer, PeerBye())
            self._peers.pop(peer).socket.close(FLUSH_MS)

    def tick(self, paused: bool) -> None:  # noqa: ARG002 - prefill says it, in its pings
        """Once every heartbeat: give up who is silent, greet who has not answered."""
        now = time.monotonic()
        for peer, dialled in tuple(self._peers.items()):
            if dialled.link.silent(now):
                self._tally.add("silent_peers", peer)
                del self._peers[peer]
                dialled.socket.close()
                self._inbox.put(PeerSilent(peer))
            else:
                self._greet(peer, dialled.link, now)

    def linked(self) -> list[Incarnation]:
        return [peer for peer, dialled in self._peers.items() if dialled.link.answered]

    def close(self, goodbye: bool) -> None:
        for peer in tuple(self._peers):
            if goodbye:
                self.hang_up(peer)
            else:
                self._peers.pop(peer).socket.close()

    # ------------------------------------------------------------ from prefill nodes

    def _greet(self, peer: Incarnation, link: DialledPeer, now: float) -> None:
        registration = self._registration
        if registration is None or not link.greeting_due(now):
            return
        fingerprint, memory = registration.fingerprint, registration.memory
        hello = PeerHello(fingerprint=fingerprint, memory=memory, lease_s=self._lease_s)
        self.send(peer, hello)

    def _refused(self, address: str, event: int, value: int) -> None:
        """Its silence will end the link; here is why."""
        why = why_refused(event, value, secured=self._settings.keys is not None)
        self._tally.add("refused_by_peers", f"{address}: {why}", key=address)

    def _receive(self, peer: Incarnation, frames: Frames) -> None:
        try:
            (payload,) = frames
            envelope: Envelope[ToDecode] = decode_to_decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._tally.add("garbage_peer_frames", str(error))
            return
        dialled = self._peers.get(peer)
        if dialled is None or envelope.source != peer or envelope.to != self._node:
            self._tally.add("stale_peer_messages", f"{envelope.source} for {envelope.to}")
            return
        link, body = dialled.link, envelope.body
        link.heard(time.monotonic())
        if link.numbers.gap(envelope.seq):
            self._tally.add("peer_sequence_gaps", peer)
        if isinstance(body, Ping):
            tell = link.pinged(body.stamp, body.paused)
            self.send(peer, Pong(heard=body.stamp, lease_s=self._lease_s))
            if not tell:
                return
        elif isinstance(body, PeerWelcome | PeerRefused):
            link.answered = True
        self._inbox.put(FromPeer(peer, body))
