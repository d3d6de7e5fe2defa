"""What runs inside the I/O thread: the rooms, composed, and their common clock."""

import asyncio
import logging
from typing import assert_never

import zmq.asyncio

from common.events import AdminDone
from common.gatekeeper import Gatekeeper
from common.logs import log_request_end
from common.messages import NodeState
from common.metrics import NodeMetrics
from common.node_io.addresses import Endpoint, advertised_host, bracketed
from common.node_io.admin import AdminDesk
from common.node_io.http import NodeHTTP, ServerInfo, Views
from common.node_io.inbox import Inbox
from common.node_io.peer_side import PeerSide, Wiring
from common.node_io.router_links import RouterLinks
from common.node_io.settings import IOSettings, NodeIdentity, Registration
from common.node_io.snapshot import Snapshot
from common.plan import CacheChanged, DialPeer, HangUp, Outgoing, ProbePeer, ToPeerMsg, ToRouterMsg
from common.tally import Tally

log = logging.getLogger(__name__)


class IOLoop:
    """Built and used in the I/O thread only; `NodeIO` calls in through the event loop."""

    def __init__(
        self,
        identity: NodeIdentity,
        settings: IOSettings,
        peers: PeerSide,
        inbox: Inbox,
        snapshot: Snapshot,
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._peers = peers
        self._snapshot = snapshot
        self._tally = Tally()
        self._context = zmq.asyncio.Context(io_threads=1)
        self._gate = Gatekeeper(self._context, settings.keys, self._tally)
        wiring = Wiring(
            identity.incarnation, settings, self._context, self._gate, inbox, self._tally
        )
        self._wiring = wiring
        self._desk = AdminDesk(inbox, self._tally)
        self._routers = RouterLinks(wiring, self._desk, snapshot)
        self._metrics = NodeMetrics(identity.role, identity.name)
        views = Views(self._problem, self._unready, self._render_metrics, self._server_info)
        self._http = NodeHTTP(
            views,
            self._desk,
            settings,
            lambda detail: self._tally.add("garbage_http", detail),
        )
        self._registration: Registration | None = None
        self._join: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._goodbye = False
        self.url = ""
        self.side_channel = ""

    # ------------------------------------------------------------ life

    async def open(self) -> None:
        """Bind everything, then know the addresses. Raises CannotBind."""
        settings = self._settings
        side_channel_port = self._peers.open(self._wiring)
        http_port = await self._http.start(settings.host, settings.port)
        routers = tuple(Endpoint.parse(url) for url in settings.routers)
        host = bracketed(advertised_host(settings.host, routers))
        self.url = f"http://{host}:{http_port}"
        if side_channel_port is not None:
            self.side_channel = f"tcp://{host}:{side_channel_port}"

    async def beat(self) -> None:
        """Tick every heartbeat until `stop`."""
        while not self._stopped.is_set():
            try:
                self._tick()
            except Exception:  # a bug here must not take the other links down
                log.exception("a heartbeat failed")
            try:
                await asyncio.wait_for(self._stopped.wait(), self._settings.heartbeat_s)
            except TimeoutError:
                continue

    def beat_now(self) -> None:
        """The node's state has changed: routers and peers should not hear it a beat later."""
        self._tick()

    def stop(self, goodbye: bool) -> None:
        self._goodbye = goodbye
        self._stopped.set()

    async def close(self) -> None:
        """Say goodbye if asked to, and close every socket."""
        if self._goodbye:
            self._routers.leave()
        if self._join is not None:
            self._join.cancel()
        self._peers.close(self._goodbye)
        self._routers.close(self._goodbye)
        self._take_measured()
        await self._http.close()
        self._gate.close()
        self._context.destroy(linger=None)

    # ------------------------------------------------------------ from the engine thread

    def announce(self, registration: Registration) -> None:
        """Join the routers; repeated calls are ignored."""
        if self._registration is None:
            self._registration = registration
            self._peers.register(registration)
            hello = registration.hello(self._identity, self.url, self.side_channel)
            self._join = asyncio.create_task(self._routers.join(hello))

    def send(self, message: Outgoing | AdminDone) -> None:
        """Carry one message or order out; never waits."""
        match message:
            case ToRouterMsg(router, to_router):
                self._routers.send(router, to_router)
            case ToPeerMsg(peer, link, to_peer):
                self._peers.send(peer, link, to_peer)
            case DialPeer(peer, address, link):
                self._peers.dial(peer, address, link)
            case HangUp(peer, link):
                self._peers.hang_up(peer, link)
            case ProbePeer(peer, address):
                self._peers.probe(peer, address)
            case CacheChanged():
                self._routers.on_cache_changed(message)
            case AdminDone():
                self._desk.done(message)
            case _:
                assert_never(message)

    def _tick(self) -> None:
        self._routers.tick()
        self._peers.tick(paused=self._snapshot.stats.state is NodeState.PAUSED)
        self._take_measured()

    def _take_measured(self) -> None:
        identity = self._identity
        for measured in self._snapshot.take_measured():
            for sample in measured.samples:
                self._metrics.observe_stage(sample.stage, sample.seconds)
            for num_bytes, seconds in measured.transferred:
                self._metrics.observe_transfer(num_bytes, seconds)
            for end in measured.ends:
                log_request_end(end, identity.role, identity.name)

    # ------------------------------------------------------------ what HTTP shows

    def _problem(self) -> str | None:
        if self._registration is None:
            return "starting: model, cache or transfer are not registered yet"
        age = self._snapshot.step_age_s()
        if age > self._settings.stuck_engine_s:
            return f"the engine has not finished a turn for {age:.1f} s"
        return None

    def _unready(self) -> str | None:
        problem = self._problem()
        if problem is not None:
            return problem
        if self._snapshot.stats.state is NodeState.DRAINING:
            return "draining: this node is leaving"
        if not any(self._routers.linked().values()):
            return "not joined: no router has welcomed this node"
        return None

    def _render_metrics(self) -> bytes:
        self._take_measured()
        age = self._snapshot.step_age_s()
        adapters = [adapter.name for adapter in self._snapshot.adapters]
        self._metrics.update(self._snapshot.stats, self._tally.counts, age, adapters)
        return self._metrics.render()

    def _server_info(self) -> ServerInfo:
        identity, registration = self._identity, self._registration
        stats = self._snapshot.stats
        return ServerInfo(
            name=identity.name,
            role=identity.role,
            incarnation=identity.incarnation,
            pid=identity.pid,
            state="starting" if registration is None else stats.state.value,
            served_model_name="" if registration is None else registration.served_model_name,
            fingerprint=None if registration is None else registration.fingerprint,
            max_model_len=0 if registration is None else registration.max_model_len,
            url=self.url,
            side_channel=self.side_channel,
            routers=self._routers.linked(),
            peers=self._peers.linked(),
            adapters=list(self._snapshot.adapters),
            step_age_s=self._snapshot.step_age_s(),
            stats=stats,
            counters=dict(self._tally.counts),
        )
