"""The router's centre: joins the node link, the registry, the dispatcher and the admin desk.

Everything runs on one event loop. A message from a node, a client's request, or the timer calls
into the pure parts; `_settle` then carries out what they decided.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from common.credentials import ClusterKeys
from common.messages import (
    Aborted,
    AdminReply,
    AdminVerb,
    CacheUpdate,
    Failed,
    FromNode,
    Goodbye,
    Heartbeat,
    Hello,
    Incarnation,
    Introduction,
    NodeAdapters,
    Pause,
    PeerGone,
    Ping,
    Refused,
    Retracted,
    Tokens,
    ToRouter,
)
from common.tally import Tally
from router.adapter_verbs import AdapterLimits, AdapterVerbs
from router.adapters import AdapterCatalogue
from router.admin import AdminDesk, NodeAnswer
from router.admission import Demand
from router.arrivals import Arrival, Arrivals
from router.cache_watch import CacheWatch
from router.dispatcher import Dispatcher
from router.effects import Send
from router.errors import ApiError, no_adapter, unavailable
from router.link import NodeLink
from router.metrics import RouterMetrics
from router.node import Loss, Node
from router.nodes import NodeRegistry
from router.prepared import ChoiceSpec
from router.protocol.terms import Terms
from router.request_log import log_end
from router.requests import Job, Listener, NewTokens
from router.timer import Timer
from router.turn import TurnEnd

log = logging.getLogger("router")

ON_DEMAND = "aborted on demand"


class RouterService:
    """What the HTTP rooms talk to."""

    def __init__(
        self,
        registry: NodeRegistry,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        *,
        adapters: AdapterCatalogue,
        adapter_limits: AdapterLimits,
        heartbeat_s: float,
        admin_timeout_s: float,
        asked_to_end: asyncio.Event,
        keys: ClusterKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.dispatcher = dispatcher
        self.metrics = metrics
        self._tally = Tally(log)
        self.counters = self._tally.counts
        self.arrivals = Arrivals(clock)
        self.adapters = adapters
        self._desk = AdminDesk(self._send_all)
        self.adapter_verbs = AdapterVerbs(
            adapters, registry, dispatcher.jobs, self._desk, adapter_limits, self.dispatch
        )
        self.turn = TurnEnd()
        self._link = NodeLink(self._on_message, self.turn.run, self._tally, keys)
        self._admin_timeout_s = admin_timeout_s
        self._clock = clock
        self._cache = CacheWatch(dispatcher.cache, self._send_all)
        self._timer = Timer(
            tick=self._tick,
            beat=self._ping,
            stood_still=registry.forgive_silence,
            beat_s=heartbeat_s,
            clock=clock,
        )
        self._closing: ApiError | None = None
        self._emptied = asyncio.Event()
        self.asked_to_end = asked_to_end
        """Set once somebody wants this router to drain and end."""

    # ------------------------------------------------------------ life

    def start(self, host: str, port: int) -> int:
        """Listen for nodes; returns the port. Raises OSError, NoCurve."""
        port = self._link.open(host, port)
        self._timer.start()
        return port

    async def stop(self) -> None:
        """Close the link. Jobs must have been ended before."""
        await self._timer.stop()
        self._cache.close()
        self._link.close()

    def _tick(self, now: float) -> None:
        for node in self.registry.expire(now):
            log.warning("gave up %s (%s): silent", node.hello.name, node.incarnation)
            self._lose(node.incarnation, Loss.SILENT, now)
        self._cache.tick(now)
        self.dispatcher.tick(now)
        self._settle(now)

    def _ping(self, now: float) -> None:
        paused = self.dispatcher.paused is not None
        for node in self.registry.all():
            self._send(Send(node.incarnation, Ping(now, paused)), now)
        self._announce(now)
        self._settle(now)

    # ------------------------------------------------------------ requests

    def check_arrival(self, arrival: Arrival, terms: Terms | None = None) -> None:
        """Refuse a request before work is put into it: by number, and by wait once `terms` say
        its place in the queue.

        Raises:
            ApiError: 429 or 503.
        """
        if self._closing is not None:
            raise self._closing
        if arrival.exempt:
            return
        others = len(self.dispatcher) + len(self.arrivals) - 1
        now = self._clock()
        self.dispatcher.intake.admission.check_count(others, now)
        if terms is not None:
            self.dispatcher.check_room_for(Demand(), terms.priority, now)

    def submit(
        self,
        arrival: Arrival,
        terms: Terms,
        choices: Sequence[ChoiceSpec],
        listeners: Sequence[Listener],
    ) -> list[Job]:
        """Accept all choices of a request, or none.

        Raises:
            ApiError: 404, 429 or 503.
        """
        if self._closing is not None:
            raise self._closing
        for choice in choices:  # it may have been unloaded since the request was read
            if choice.adapter is not None and not self.adapters.serves(choice.adapter):
                raise no_adapter(choice.adapter.name)
        now = self._clock()
        if not arrival.exempt:
            self.dispatcher.check_room_for(Demand.of(choices), terms.priority, now)
        self.arrivals.accepted(arrival)
        names = [f"-{i}" for i in range(len(choices))] if len(choices) > 1 else [""]
        jobs = [
            self.dispatcher.submit(
                arrival.rid,
                name,
                choice.prompt_ids,
                choice.sampling,
                ear,
                now,
                terms=terms,
                arrived=arrival.at,
                adapter=choice.adapter,
            )
            for name, choice, ear in zip(names, choices, listeners, strict=True)
        ]
        if arrival.aborted:
            self.dispatcher.abort(jobs, now, ON_DEMAND)
        self._settle(now)
        return jobs

    def cancel(self, jobs: Sequence[Job], outcome: str = "disconnected") -> None:
        """End jobs that nobody wants any more. Ended ones are left alone."""
        now = self._clock()
        for job in jobs:
            self.dispatcher.cancel(job, now, outcome)
        self._settle(now)

    def drain(self) -> None:
        """Take nothing new from now on. Repeated calls change nothing."""
        if self._closing is None:
            log.info("draining: %d choices are unfinished", len(self.dispatcher))
            self._closing = unavailable("the router is draining", "draining")
            self.asked_to_end.set()
            self._settle(self._clock())

    async def wait_until_empty(self, timeout_s: float) -> bool:
        """After `drain`: until every request has ended; False if some have not in time."""
        try:
            await asyncio.wait_for(self._emptied.wait(), timeout_s)
        except TimeoutError:
            log.warning("not drained: %d choices are unfinished", len(self.dispatcher))
            return False
        return True

    def unready(self) -> str | None:
        """Why this router cannot serve a request that comes now; None if it can."""
        return self._closing.message if self._closing is not None else self.registry.unready()

    def fail_all(self, error: ApiError) -> None:
        """End everything with an error, and refuse what comes after: the router goes away."""
        now = self._clock()
        self._closing = error
        self.dispatcher.fail_all(error, now)
        self._settle(now)

    # ------------------------------------------------------------ admin

    def dispatch(self) -> None:
        """Look again for work that can start: a node may have become ready."""
        now = self._clock()
        self.dispatcher.dispatch(now)
        self._settle(now)

    def abort(self, rid: str | None) -> int:
        """Abort this router's requests by the client's name for them; None means all."""
        now = self._clock()
        jobs = [j for j in self.dispatcher.unfinished() if rid in (None, j.public_rid, j.rid)]
        count = self.dispatcher.abort(jobs, now, ON_DEMAND) + self.arrivals.abort(rid)
        self._settle(now)
        return count

    def pause_dispatch(self, pause: Pause) -> None:
        now = self._clock()
        self.dispatcher.pause(pause.mode, now)
        self._settle(now)

    def resume_dispatch(self) -> None:
        now = self._clock()
        self.dispatcher.resume(now)
        self._settle(now)

    async def administer(self, nodes: Sequence[Node], verb: AdminVerb) -> list[NodeAnswer]:
        """Have nodes carry out a verb; waits for each answer, with a bound."""
        return await self._desk.carry_out(nodes, verb, self._admin_timeout_s)

    # ------------------------------------------------------------ what nodes say

    def on_garbage_http(self, detail: str) -> None:
        """Bytes that are not HTTP came to the endpoint."""
        self._tally.add("garbage_http", detail)

    def _on_message(self, routing_id: bytes, envelope: FromNode) -> None:
        now = self._clock()
        source, body = envelope.source, envelope.body
        if isinstance(body, Hello):  # whether who has its name can still be reached
            for rival in self.registry.rivals(source, body):
                self._send(Send(rival.incarnation, Ping(now)), now)
        received = self.registry.receive(routing_id, envelope, now)
        if received.dropped is not None:
            self.counters[received.dropped] += 1
            if received.refused is not None:
                self._refuse(routing_id, envelope, received.refused)
            else:
                what = f"{type(body).__name__} of {source[:200]}"
                self._tally.tell(received.dropped, what)
        if received.greet_me:
            self._link.send(routing_id, self.registry.greet_me(source))
        if received.loss is not None:
            log.warning("%s: its attempts are over (%s)", source, received.loss)
            self._lose(source, received.loss, now)
        for node in received.replaced:
            log.warning("gave up %s (%s): restarted", node.hello.name, node.incarnation)
            self._lose(node.incarnation, Loss.REPLACED, now)
        if received.welcome is not None:
            self._send(Send(source, received.welcome), now)
        if received.body is not None:
            self._on_body(source, received.body, now)
        self._carry_out(now)

    def _refuse(self, routing_id: bytes, envelope: FromNode, refused: Refused) -> None:
        """Tell it why, and the log once for each node and reason."""
        source, body = envelope.source, envelope.body
        name = body.name if isinstance(body, Hello | Introduction) else ""
        detail = f"{name} ({source}): {refused.reason}"
        self._tally.tell("refused_nodes", detail, key=f"{source} {refused.reason}")
        self._link.send(routing_id, self.registry.refusal(source, refused))

    def _on_body(self, source: Incarnation, body: ToRouter, now: float) -> None:
        match body:
            case Tokens(outputs):
                self.dispatcher.on_tokens(source, outputs, now)
            case Retracted(room):
                self.dispatcher.on_retracted(source, room, now)
            case Failed():
                self.dispatcher.on_failed(source, body, now)
            case Aborted(room):
                self.dispatcher.on_aborted(source, room, now)
            case AdminReply():
                self._desk.on_reply(source, body)
            case Hello():
                self._log_join(source, body)
                self._cache.on_hello(source, body)
                self._announce(now)
                self.dispatcher.dispatch(now)
            case Heartbeat():
                self.dispatcher.on_heartbeat(source, now)
            case NodeAdapters(adapters):
                node = self.registry.get(source)
                assert node is not None
                self.adapter_verbs.on_list(node, adapters)
                self.dispatcher.dispatch(now)
            case CacheUpdate():
                self._cache.on_update(source, body, now)
            case Goodbye():
                pass  # the registry has made a loss of it

    def _log_join(self, source: Incarnation, hello: Hello) -> None:
        log.info("%s node %s joined (%s, %s)", hello.role, hello.name, source, hello.url)
        for mismatch in self.registry.fleet.mismatches:
            self._tally.add("mismatched_pairs", mismatch, key=mismatch)

    def _lose(self, node: Incarnation, loss: Loss, now: float) -> None:
        """End the attempts on a node; when it is given up, tell all others.

        Who has left said so to its peers itself, once its writes had ended. A word from here could
        overtake that, and what those writes notify.
        """
        self.dispatcher.on_node_loss(node, loss, now)
        if loss is not Loss.GAP:
            self.adapters.on_loss(node)
            self._cache.on_loss(node)
            self._desk.on_node_loss(node)
        if self.registry.get(node) is None:
            for other in self.registry.all() if loss is not Loss.LEFT else ():
                self._send(Send(other.incarnation, PeerGone(node)), now)
            self._announce(now)

    def _announce(self, now: float) -> None:
        """Decode nodes shake hands before the first request; see `NodeRegistry.announcements`."""
        for node, peers in self.registry.announcements():
            self._send(Send(node.incarnation, peers), now)

    # ------------------------------------------------------------ effects

    def _settle(self, now: float) -> None:
        """Carry out what the dispatcher decided, and let listeners look at it."""
        self._carry_out(now)
        self.turn.run()

    def _carry_out(self, now: float) -> None:
        """Until nothing new comes of it."""
        while True:
            effects = self.dispatcher.drain()
            if not effects:
                break
            for send in effects.sends:
                self._send(send, now)
            for delivery in effects.deliveries:
                output = delivery.output
                if isinstance(output, NewTokens):
                    count = len(output.token_ids)
                    self.metrics.on_tokens(count, delivery.waited_s, first=delivery.first)
                delivery.job.listener.deliver(output)
            for job in effects.ended:
                self.adapter_verbs.on_ended(job)
                self.metrics.on_end(job)
                log_end(job)
        if self._closing is not None and not len(self.dispatcher):
            self._emptied.set()

    def _send_all(self, sends: Sequence[Send]) -> None:
        now = self._clock()
        for send in sends:
            self._send(send, now)
        self._settle(now)

    def _send(self, send: Send, now: float) -> None:
        node = self.registry.get(send.node)
        if node is None or not node.linked:
            return
        if self._link.send(node.routing_id, self.registry.envelope(node, send.body)):
            return
        if self.registry.unreachable(node.incarnation) is not None:
            log.warning("%s (%s) cannot be reached", node.hello.name, node.incarnation)
            self._lose(node.incarnation, Loss.UNREACHABLE, now)
