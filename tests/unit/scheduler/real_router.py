"""The real dispatcher in the virtual cluster: same interface as `ModelRouter`."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.events import FromRouter
from common.messages import (
    Abort,
    Aborted,
    Adapter,
    Envelope,
    Failed,
    Generate,
    Goodbye,
    Grammar,
    GrammarKind,
    Heartbeat,
    Hello,
    Incarnation,
    NodeAdapters,
    Retracted,
    SamplingParams,
    Tokens,
    ToRouter,
)
from common.modes import DisaggregationMode
from router.adapters import AdapterCatalogue
from router.dispatcher import Dispatcher
from router.limits import Limits
from router.local_prefill import LocalLimits
from router.node import Loss
from router.nodes import NodeRegistry
from router.policies import random_choice
from router.replay import ReplayLimits
from router.requests import Job, JobAborted, JobFailed, NewTokens, Output
from tests.unit.scheduler.client import GONE, Client
from tests.unit.scheduler.model import Violation

if TYPE_CHECKING:
    from tests.unit.scheduler.world import World

ME = "router-1"
PATIENT = Limits(
    node_wait_s=1e9,
    request_timeout_s=1e9,
    replay=ReplayLimits(
        max_after_death=10**6, max_after_fault=10**6, max_after_refusal=10**6, backoff_s=0.0
    ),
)


@dataclass
class Listening:
    """A client and the ear it lends the dispatcher."""

    client: Client
    job: Job | None = None

    def deliver(self, output: Output) -> None:
        client = self.client
        match output:
            case NewTokens(token_ids, _, finish, scores):
                client.output += token_ids
                if scores is not None:
                    client.scores.append([told.logprob for told in scores])
                if finish is not None:
                    self._end(finish.value)
            case JobAborted():
                client.aborted = True
                self._end("abort")
            case JobFailed(error) if client.adapter is not None and error.status == 404:
                self._end(GONE)
            case JobFailed(error):
                raise Violation(f"{client.rid} failed: {error}")

    def _end(self, reason: str) -> None:
        self.client.ends += 1
        self.client.end = reason


class RealRouter:
    """Feeds `Dispatcher` with what the world's nodes say, and carries out what it decides."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.muted: set[Incarnation] = set()
        self.pending: dict[Incarnation, list[ToRouter]] = defaultdict(list)
        local = LocalLimits(tokens=8) if world.local else LocalLimits(tokens=0, share=1.0)
        self._registry = NodeRegistry(ME, timeout_s=1e9, decode_alone=world.local > 0)
        chance = random.Random(world.random.random())
        choose = random_choice(chance)
        self._adapters = AdapterCatalogue()
        self.dispatcher = Dispatcher(
            self._registry,
            replace(PATIENT, local=local),
            choose_prefill=choose,
            choose_decode=choose,
            random=chance,
            adapters=self._adapters,
        )
        self._listening: list[Listening] = []

    @property
    def clients(self) -> list[Client]:
        return [listening.client for listening in self._listening]

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        stop: tuple[int, ...] = (),
        adapter: Adapter | None = None,
    ) -> Client:
        client = Client(f"r{len(self._listening)}", prompt, max_tokens, stop, self.world.now)
        client.adapter = adapter
        listening = Listening(client)
        self._listening.append(listening)
        count = len(self._listening)
        client.wants_scores = count % 3 == 0
        grammar = Grammar(GrammarKind.REGEX, f"a{{{count}}}") if count % 4 == 0 else None
        sampling = SamplingParams(
            max_tokens=max_tokens,
            seed=1,
            stop_token_ids=stop,
            prompt_logprobs=0 if client.wants_scores else None,
            grammar=grammar,
        )
        listening.job = self.dispatcher.submit(
            client.rid, "", prompt, sampling, listening, self.world.now, adapter=adapter
        )
        return client

    def knows(self, adapter: Adapter) -> bool:
        """Whether a request may name it."""
        return self._adapters.serves(adapter)

    def settle_adapters(self, wanted: Container[str]) -> None:
        """The last step of an unload verb that no node was there to hear."""
        for entry in self._adapters.entries():
            if entry.name not in wanted and not self._adapters.holders(entry.name):
                self._adapters.unloaded(self._adapters.begin_unload(entry.name))

    def receive(self, node: Incarnation, body: ToRouter) -> None:
        self.pending[node].append(body)

    def forget_pending(self, node: Incarnation) -> None:
        self.pending.pop(node, None)

    def abort(self, client: Client) -> None:
        for listening in self._listening:
            if listening.client is client and listening.job is not None:
                self.dispatcher.abort([listening.job], self.world.now, "asked")

    def on_node_lost(self, node: Incarnation) -> None:
        """Dead, or its link broke: a live one greets again at once."""
        self.pending.pop(node, None)
        loss = Loss.RELINKED if node in self.world.nodes else Loss.UNREACHABLE
        if loss is Loss.UNREACHABLE:
            self._say(node, Goodbye())
        self._adapters.on_loss(node)
        self.dispatcher.on_node_loss(node, loss, self.world.now)

    def on_node_left(self, node: Incarnation) -> None:
        """It said goodbye: what it said before that counts."""
        for body in self.pending.pop(node, []):
            self._on_message(node, body)
        self._say(node, Goodbye())
        self._adapters.on_loss(node)
        self.dispatcher.on_node_loss(node, Loss.LEFT, self.world.now)

    def turn(self) -> None:
        now = self.world.now
        self._refresh()
        for node, bodies in list(self.pending.items()):
            self.pending[node] = []
            for body in bodies:
                self._on_message(node, body)
        self.dispatcher.tick(now)
        effects = self.dispatcher.drain()
        for delivery in effects.deliveries:
            delivery.job.listener.deliver(delivery.output)
        for send in effects.sends:
            if send.node in self.world.nodes and isinstance(send.body, Generate | Abort):
                repeats = 2 if self.world.random.random() < self.world.repeat else 1
                inbox = self.world.nodes[send.node].inbox
                inbox.extend([FromRouter(ME, send.body)] * repeats)

    def _refresh(self) -> None:
        """What heartbeats would tell the registry."""
        for name, node in self.world.nodes.items():
            if self._registry.get(name) is None:
                self._say(name, self._hello(name), to="", seq=1)
            held = node.scheduler.adapters
            if self._adapters.listed(name) != held:
                self._say(name, NodeAdapters(list(held)))
                self._adapters.on_list(name, held)
            self._say(name, Heartbeat(stats=node.scheduler.stats(), step_age_s=0.0))
            self.dispatcher.on_heartbeat(name, self.world.now)

    def _hello(self, name: Incarnation) -> Hello:
        settings = self.world.nodes[name].scheduler.settings
        role = DisaggregationMode.PREFILL if name.startswith("p") else DisaggregationMode.DECODE
        return Hello(
            role=role,
            name=name,
            url="",
            pid=1,
            served_model_name="m",
            fingerprint=settings.fingerprint,
            max_model_len=settings.max_model_len,
            max_running_requests=settings.max_running_requests,
            num_pages=settings.num_pages,
            side_channel="tcp://side",
        )

    def _say(self, node: Incarnation, body: ToRouter, to: str = ME, seq: int | None = None) -> None:
        known = self._registry.get(node)
        number = seq if seq is not None else known.next_from if known is not None else 1
        envelope: Envelope[ToRouter] = Envelope(node, to, number, body)
        self._registry.receive(node.encode(), envelope, self.world.now)

    def _on_message(self, node: Incarnation, body: ToRouter) -> None:
        now = self.world.now
        match body:
            case Tokens(outputs):
                self.dispatcher.on_tokens(node, outputs, now)
            case Retracted(room):
                self.dispatcher.on_retracted(node, room, now)
            case Aborted(room):
                self.dispatcher.on_aborted(node, room, now)
            case Failed():
                self.dispatcher.on_failed(node, body, now)
            case _:
                raise Violation(f"unexpected {body}")

    def all_ended(self) -> bool:
        return all(client.end is not None for client in self.clients)

    def open_requests(self) -> list[str]:
        return [f"{job.rid} {job.state} {job.attempt}" for job in self.dispatcher.unfinished()]

    def check(self) -> None:
        """Every client was answered once, with the undisturbed tokens."""
        for client in self.clients:
            client.check()
        if self.dispatcher.counters["token_gaps"]:
            raise Violation("a token was lost between a node and the dispatcher")
