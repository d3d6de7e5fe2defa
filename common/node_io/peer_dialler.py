"""Decode's end of the side channel: one DEALER socket for each prefill incarnation in use.

A link ends in one place, `_end`: the socket is closed first and the engine told afterwards, so that
no ping is echoed once the engine counts from the link's end.
"""

import asyncio
import functools
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import zmq

from common.events import FromPeer, PeerClosed, PeerProbed, Reach
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
from common.node_io.probe import probe
from common.node_io.settings import Registration
from common.node_io.sockets import FLUSH_MS, MessageSocket, routing_id
from common.zmq_reading import Frames


class Dialled:
    """A `DialledPeer` and the socket it lives on."""

    def __init__(self, endpoint: Endpoint, socket: MessageSocket, link: DialledPeer) -> None:
        self.endpoint = endpoint
        self.socket = socket
        self.link = link


class PeerDialler:
    """Dials prefill nodes, greets until answered, echoes their pings, and asks after the silent."""

    def __init__(self, lease_s: float) -> None:
        """`lease_s`: how long after an echoed ping prefill may still post writes into this node."""
        self._lease_s = lease_s
        self._registration: Registration | None = None
        self._peers: dict[Incarnation, Dialled] = {}
        self._tasks: set[asyncio.Task[None]] = set()

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

    def dial(self, peer: Incarnation, address: str, link: int) -> None:
        """Connect and greet. An address that makes no sense is a peer that cannot be reached."""
        try:
            endpoint = Endpoint.parse(address)
        except ValueError as error:
            self._tally.add("bad_peer_addresses", str(error))
            self._inbox.put(PeerClosed(peer, link, str(error), silent_s=None))
            return
        if peer in self._peers:
            self._end(peer, "dialled anew")
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, routing_id(self._node))
        dealer.setsockopt(zmq.IPV6, int(endpoint.is_ipv6))
        dial_with(dealer, self._settings.keys)
        socket = MessageSocket(dealer, functools.partial(self._receive, peer, link))
        socket.watch_connections(refused=functools.partial(self._refused, address))
        dealer.connect(str(endpoint))
        socket.start()
        settings, now = self._settings, time.monotonic()
        dialled = DialledPeer(link, now, settings.heartbeat_s, settings.peer_timeout_s)
        self._peers[peer] = Dialled(endpoint, socket, dialled)
        self._greet(peer, dialled, now)

    def send(self, peer: Incarnation, link: int, body: ToPrefill | ToDecode) -> None:
        """A `Destination` takes the newest ping with it: naming pages renews their lease."""
        dialled = self._peers.get(peer)
        if dialled is None or dialled.link.number != link:
            self._tally.add("messages_to_unlinked_peers", type(body).__name__)
            return
        if isinstance(body, Destination) and dialled.link.stamp is not None:
            stamp, lease_s = dialled.link.stamp, self._lease_s
            body = msgspec.structs.replace(body, heard=stamp, lease_s=lease_s)
        envelope = Envelope(self._node, peer, dialled.link.numbers.next(), body)
        if not dialled.socket.send([encode(envelope)]):
            self._tally.add("dropped_peer_messages", type(body).__name__)

    def hang_up(self, peer: Incarnation, link: int) -> None:
        """Say goodbye and close; from here on no ping of this link is echoed."""
        dialled = self._peers.get(peer)
        if dialled is not None and dialled.link.number == link:
            self.send(peer, link, PeerBye())
            self._end(peer, "hung up", linger_ms=FLUSH_MS)

    def probe(self, peer: Incarnation, address: str) -> None:
        """Ask the kernel at that address, and tell the engine."""
        try:
            endpoint = Endpoint.parse(address)
        except ValueError:
            self._inbox.put(PeerProbed(peer, Reach.UNREACHABLE))
        else:
            self._spawn(self._probe_for_engine(peer, endpoint))

    def tick(self, paused: bool) -> None:  # noqa: ARG002 - prefill says it, in its pings
        """Once every heartbeat: give up who is silent, greet who has not answered."""
        now = time.monotonic()
        for peer, dialled in tuple(self._peers.items()):
            link = dialled.link
            if link.silent(now):
                self._tally.add("silent_peers", peer)
                self._end(peer, "the peer is silent")
                continue
            if link.doubtful(now) and not link.probing:
                link.probing = True
                self._spawn(self._probe_silent(peer, dialled))
            self._greet(peer, link, now)

    def linked(self) -> list[Incarnation]:
        return [peer for peer, dialled in self._peers.items() if dialled.link.answered]

    def close(self, goodbye: bool) -> None:
        for task in self._tasks:
            task.cancel()
        for peer, dialled in tuple(self._peers.items()):
            if goodbye:
                self.hang_up(peer, dialled.link.number)
            else:
                self._end(peer, "this node ends")

    def _end(self, peer: Incarnation, why: str, *, gone: bool = False, linger_ms: int = 0) -> None:
        dialled = self._peers.pop(peer)
        dialled.socket.close(linger_ms)
        link = dialled.link
        silent_s = link.silent_s(time.monotonic())
        self._inbox.put(PeerClosed(peer, link.number, why, silent_s=silent_s, gone=gone))

    # ------------------------------------------------------------ whether a peer still exists

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe_for_engine(self, peer: Incarnation, endpoint: Endpoint) -> None:
        self._inbox.put(PeerProbed(peer, await probe(endpoint)))

    async def _probe_silent(self, peer: Incarnation, dialled: Dialled) -> None:
        """A ping is missing. A refused connection is certainty, and need not wait for more."""
        reach = await probe(dialled.endpoint)
        dialled.link.probing = False
        current = self._peers.get(peer) is dialled
        if current and reach is Reach.GONE and dialled.link.doubtful(time.monotonic()):
            self._tally.add("gone_peers", peer)
            self._end(peer, "nobody listens at its address", gone=True)

    # ------------------------------------------------------------ from prefill nodes

    def _greet(self, peer: Incarnation, link: DialledPeer, now: float) -> None:
        registration = self._registration
        if registration is None or not link.greeting_due(now):
            return
        hello = PeerHello(
            fingerprint=registration.fingerprint,
            memories=registration.memories,
            lease_s=self._lease_s,
            link=link.number,
        )
        self.send(peer, link.number, hello)

    def _refused(self, address: str, event: int, value: int) -> None:
        """Its silence will end the link; here is why."""
        why = why_refused(event, value, secured=self._settings.keys is not None)
        self._tally.add("refused_by_peers", f"{address}: {why}", key=address)

    def _receive(self, peer: Incarnation, number: int, frames: Frames) -> None:
        try:
            (payload,) = frames
            envelope: Envelope[ToDecode] = decode_to_decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._tally.add("garbage_peer_frames", str(error))
            return
        dialled = self._peers.get(peer)
        source, body = envelope.source, envelope.body
        if dialled is None or dialled.link.number != number or envelope.to != self._node:
            self._tally.add("stale_peer_messages", f"{source} for {envelope.to}")
            return
        if source != peer:
            self._tally.add("stale_peer_messages", f"{source} for {envelope.to}")
            if isinstance(body, PeerRefused) and source:
                self._end(peer, f"{source} is at its address now", gone=True)
            return
        link = dialled.link
        link.heard(time.monotonic())
        if envelope.seq and link.numbers.gap(envelope.seq):
            self._tally.add("peer_sequence_gaps", peer)
        if isinstance(body, Ping):
            tell = link.pinged(body.stamp, body.paused)
            self.send(peer, number, Pong(heard=body.stamp, lease_s=self._lease_s))
            if not tell:
                return
        elif isinstance(body, PeerWelcome | PeerRefused):
            link.answered = True
        self._inbox.put(FromPeer(peer, number, body))
