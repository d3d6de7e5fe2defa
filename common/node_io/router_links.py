"""All routers this node has joined: one DEALER socket for each address behind `--router`."""

import asyncio
import functools
import logging
import time
from typing import assert_never

import msgspec
import zmq

from common.events import AdminDone, FromRouter, RouterLost
from common.gatekeeper import dial_with, why_refused
from common.messages import (
    Abort,
    AdapterInfo,
    Admin,
    AdminReply,
    Envelope,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Incarnation,
    ListCache,
    NodeAdapters,
    PeerGone,
    Peers,
    Ping,
    Refused,
    ToNode,
    ToRouter,
    Welcome,
    decode_to_node,
    encode,
)
from common.node_io.addresses import Endpoint, expand
from common.node_io.admin import AdminDesk
from common.node_io.cache_news import CacheNews
from common.node_io.peer_side import Wiring
from common.node_io.router_link import RouterLink
from common.node_io.snapshot import Snapshot
from common.node_io.sockets import FLUSH_MS, MessageSocket, routing_id
from common.plan import CacheChanged
from common.zmq_reading import Frames

log = logging.getLogger(__name__)

OPEN_AGAIN_S = (0.25, 5.0)
"""Shortest and longest wait after a refused handshake; it doubles each time."""
GREET_AGAIN_S = 0.05
"""The monitor can report a connection a moment before messages may be queued on it."""


class RouterConnection:
    """A `RouterLink` and the socket it lives on."""

    def __init__(self, endpoint: Endpoint, link: RouterLink) -> None:
        self.endpoint = endpoint
        self.link = link
        self.socket: MessageSocket | None = None
        self.num_refused = 0
        """Handshakes that failed since one succeeded."""
        self.open_at = 0.0
        """While there is no socket: when to open another."""
        self.told: tuple[AdapterInfo, ...] | None = None
        """The adapters that the linked router has heard of; None before it heard of any."""


class RouterLinks:
    """Greets, beats, listens and speaks; everything here runs in the I/O thread's loop."""

    def __init__(self, wiring: Wiring, desk: AdminDesk, snapshot: Snapshot) -> None:
        """Raises ValueError for an address that is not tcp://host:port."""
        self._node = wiring.node
        self._settings = wiring.settings
        self._context = wiring.context
        self._inbox = wiring.inbox
        self._tally = wiring.tally
        self._endpoints = tuple(Endpoint.parse(url) for url in wiring.settings.routers)
        self._desk = desk
        self._snapshot = snapshot
        self._cache = CacheNews(self.send)
        self._hello: Hello | None = None
        self._connections: dict[Endpoint, RouterConnection] = {}
        self._linked: dict[Incarnation, RouterConnection] = {}

    # ------------------------------------------------------------ from the node

    async def join(self, hello: Hello) -> None:
        """Dial every router and introduce the node; follow DNS until cancelled."""
        self._hello = hello
        while True:
            expanded = await asyncio.gather(*(expand(e) for e in self._endpoints))
            self._follow(frozenset(endpoint for found in expanded for endpoint in found))
            if all(endpoint.is_literal for endpoint in self._endpoints):
                return
            await asyncio.sleep(self._settings.resolve_s)

    def send(self, router: Incarnation, body: ToRouter) -> None:
        """To a linked router; dropped and counted if it is not, or not any more.

        Whatever is said, the router knows by then which adapters this node has: the answer to a
        load follows the list that shows it.
        """
        connection = self._linked.get(router)
        if connection is None:
            self._tally.add("messages_to_unlinked_routers", type(body).__name__)
            return
        adapters = self._snapshot.adapters
        if connection.told is not adapters:
            if connection.told != adapters:
                self._say(connection, router, NodeAdapters(list(adapters)))
            connection.told = adapters
        self._say(connection, router, body)

    def _say(self, connection: RouterConnection, router: Incarnation, body: ToRouter) -> None:
        """The next message; if it cannot leave, the gap in the numbers ends the link."""
        if not self._post(connection, router, connection.link.number(), body):
            self._tally.add("dropped_router_messages", type(body).__name__)

    def on_cache_changed(self, change: CacheChanged) -> None:
        """All routers hear of it, a little later."""
        self._cache.on_change(change)

    def tick(self) -> None:
        """Once every heartbeat: judge silence, greet who is not linked, beat to who is."""
        now = time.monotonic()
        for connection in tuple(self._connections.values()):
            if connection.link.silent(now):
                log.warning("router %s is silent", connection.endpoint)
                self._lose(connection.link.lose())
                self._open(connection)
            elif connection.socket is None and now >= connection.open_at:
                self._open(connection)
            self._greet(connection, now)
        for router in tuple(self._linked):
            self._beat(router)

    def leave(self) -> None:
        """Tell every router that this node goes on purpose."""
        for router in tuple(self._linked):
            self.send(router, Goodbye())

    def close(self, goodbye: bool) -> None:
        self._cache.close()
        for connection in self._connections.values():
            if connection.socket is not None:
                connection.socket.close(FLUSH_MS if goodbye else 0)
        self._connections.clear()
        self._linked.clear()

    def linked(self) -> dict[str, Incarnation | None]:
        """Address -> incarnation of the router linked there, for server info."""
        return {str(c.endpoint): c.link.router for c in self._connections.values()}

    # ------------------------------------------------------------ connections

    def _follow(self, wanted: frozenset[Endpoint]) -> None:
        """Dial new addresses; forget vanished ones once nobody is linked there."""
        for endpoint in wanted:
            if endpoint not in self._connections:
                settings = self._settings
                link = RouterLink(self._node, settings.heartbeat_s, settings.router_timeout_s)
                connection = self._connections[endpoint] = RouterConnection(endpoint, link)
                self._open(connection)
        for connection in tuple(self._connections.values()):
            named = connection.endpoint in wanted or connection.endpoint in self._endpoints
            if not named and connection.link.router is None and wanted:
                del self._connections[connection.endpoint]
                if connection.socket is not None:
                    connection.socket.close()

    def _open(self, connection: RouterConnection) -> None:
        """A fresh socket: nothing queued for a lost link may reach the next one."""
        if connection.socket is not None:
            connection.socket.close()
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # no connection, no queue: stale Hellos would pile up
        dealer.setsockopt(zmq.ROUTING_ID, routing_id(self._node))
        dealer.setsockopt(zmq.IPV6, int(connection.endpoint.is_ipv6))
        dial_with(dealer, self._settings.keys)
        socket = MessageSocket(dealer, functools.partial(self._receive, connection))
        socket.watch_connections(
            connected=functools.partial(self._connected, connection),
            broken=functools.partial(self._broken, connection),
            refused=functools.partial(self._refused, connection),
        )
        dealer.connect(str(connection.endpoint))
        socket.start()
        connection.socket = socket

    def _connected(self, connection: RouterConnection) -> None:
        connection.num_refused = 0
        connection.link.connected()
        self._greet(connection, time.monotonic())
        loop = asyncio.get_running_loop()
        loop.call_later(GREET_AGAIN_S, lambda: self._greet(connection, time.monotonic()))

    def _broken(self, connection: RouterConnection) -> None:
        """Whatever was on its way is lost, and the next thing said there will be a Hello."""
        self._lose(connection.link.lose())

    def _refused(self, connection: RouterConnection, event: int, value: int) -> None:
        """The handshake failed. ZMQ may give up here or try ten times a second: we do neither."""
        why = why_refused(event, value, secured=self._settings.keys is not None)
        at = str(connection.endpoint)
        self._tally.add("refused_by_routers", f"{at}: {why}", key=at)
        shortest, longest = OPEN_AGAIN_S
        delay = min(shortest * 2**connection.num_refused, longest)
        connection.num_refused = min(connection.num_refused + 1, 16)
        connection.open_at = time.monotonic() + delay
        if connection.socket is not None:
            connection.socket.close()
            connection.socket = None

    def _greet(self, connection: RouterConnection, now: float) -> None:
        link = connection.link
        if self._hello is None or connection.socket is None or not link.greeting_due(now):
            return
        envelope = Envelope[ToRouter](self._node, "", 1, self._hello)
        if connection.socket.send([encode(envelope)]):
            link.greeted(now)

    def _beat(self, router: Incarnation) -> None:
        snapshot = self._snapshot
        self.send(router, Heartbeat(stats=snapshot.stats, step_age_s=snapshot.step_age_s()))

    def _post(
        self, connection: RouterConnection, router: Incarnation, seq: int, body: ToRouter
    ) -> bool:
        socket = connection.socket
        return socket is not None and socket.send([encode(Envelope(self._node, router, seq, body))])

    # ------------------------------------------------------------ from routers

    def _receive(self, connection: RouterConnection, frames: Frames) -> None:
        try:
            (payload,) = frames
            envelope: Envelope[ToNode] = decode_to_node(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._tally.add("garbage_router_frames", str(error))
            return
        received = connection.link.receive(envelope, time.monotonic())
        if received.lost is not None:
            self._lose(received.lost)
        if received.dropped is not None:
            self._tally.add(received.dropped, type(envelope.body).__name__)
        if received.refused is not None:
            at = f"{envelope.source} at {connection.endpoint}"
            self._tally.add("refused_by_routers", f"{at}: {received.refused}", key=at)
        elif received.body is not None:
            self._act(connection, envelope.source, received.body)
        else:
            self._greet(connection, time.monotonic())

    def _act(self, connection: RouterConnection, router: Incarnation, body: ToNode) -> None:
        match body:
            case Welcome():
                self._welcomed(connection, router)
            case Generate() | Abort() | PeerGone() | Peers():
                self._inbox.put(FromRouter(router, body))
            case Admin(id=admin_id, verb=verb):
                self._desk.ask(verb, functools.partial(self._answer, router, admin_id))
            case ListCache():
                self._cache.on_asked(router)
            case Ping() | Refused():
                pass  # the link has noted it
            case _:
                assert_never(body)

    def _welcomed(self, connection: RouterConnection, router: Incarnation) -> None:
        first = self._linked.get(router)
        if first is None or first is connection:
            log.info("joined router %s at %s", router, connection.endpoint)
            self._linked[router] = connection
            connection.told = None
            self._beat(router)
            self._cache.on_linked(router)
            return
        log.warning("%s and %s are one router", first.endpoint, connection.endpoint)
        connection.link.park(router)
        self._lose(first.link.lose())  # the router has moved this node to the newer connection
        connection.link.park(router)
        self._greet(first, time.monotonic())

    def _answer(self, router: Incarnation, admin_id: int, done: AdminDone) -> None:
        reply = AdminReply(id=admin_id, ok=done.ok, message=done.message, digest=done.digest)
        self.send(router, reply)

    def _lose(self, router: Incarnation | None) -> None:
        """Report a loss to the engine, once; its other address, if any, may be tried again."""
        if router is None:
            return
        self._tally.add("lost_routers", router)
        linked = self._linked.get(router)
        if linked is not None and linked.link.router != router:
            del self._linked[router]
            self._cache.on_lost(router)
            for connection in self._connections.values():
                if connection.link.parked_for == router:
                    connection.link.connected()
        self._inbox.put(RouterLost(router))
