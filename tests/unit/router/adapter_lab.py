"""A router without sockets: its service, nodes in a test's hand, an event loop turned by hand."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any
from unittest import mock

from common.messages import (
    Abort,
    Adapter,
    AdapterInfo,
    Admin,
    AdminReply,
    Envelope,
    Failed,
    FailureKind,
    Generate,
    Hello,
    LoadAdapter,
    NodeAdapters,
    Ping,
    SamplingParams,
    StopReason,
    TokenOutput,
    Tokens,
    ToNode,
    ToRouter,
    UnloadAdapter,
    Welcome,
)
from common.modes import DisaggregationMode
from router.adapter_verbs import AdapterLimits
from router.adapters import AdapterCatalogue
from router.dispatcher import Dispatcher
from router.errors import ApiError
from router.limits import Limits
from router.link import OnMessage
from router.metrics import RouterMetrics
from router.nodes import NodeRegistry
from router.policies import random_choice
from router.prepared import ChoiceSpec
from router.protocol.terms import DEFAULT_TERMS
from router.requests import Job
from router.service import RouterService
from router.text_stream import TextOptions
from tests.unit.router.desk import ME, Ear, hello

NAMES = ("a", "b")
SLOTS = ("p1", "p2", "d1", "d2")
"""Places of nodes; a new process in a place has a new incarnation."""


class SimNode:
    """Does what it is told when it is let; what it says arrives at once, unless it is cut off."""

    def __init__(self, slot: str, incarnation: str, disk: dict[str, str]) -> None:
        self.slot = slot
        self.incarnation = incarnation
        self.disk = disk
        self.holds: dict[str, str] = {}
        self.inbox: deque[ToNode] = deque()
        self.rooms: dict[int, Generate] = {}
        self.cut = False
        self.seq = 0


class FakeLink:
    """Stands for the socket; checks each attempt as it leaves."""

    def __init__(self, lab: "Lab", on_message: OnMessage) -> None:
        self._lab = lab
        self.on_message = on_message

    def send(self, routing_id: bytes, envelope: Envelope[ToNode]) -> bool:
        node = self._lab.living.get(routing_id.decode())
        if node is None or node.cut:
            return False
        if isinstance(envelope.body, Generate):
            self._lab.check_half(node, envelope.body)
        node.inbox.append(envelope.body)
        return True


class Lab:
    """A router's service, nodes in a test's hand, and an event loop that is turned by hand."""

    def __init__(self, seed: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.now = 100.0
        self.random = Random(seed)
        self.living: dict[str, SimNode] = {}
        self.halves: dict[int, Adapter | None] = {}
        self.born = 0
        registry, catalogue = NodeRegistry(ME, timeout_s=1e9), AdapterCatalogue()
        choose = random_choice(self.random)
        dispatcher = Dispatcher(
            registry, Limits(node_wait_s=5.0), choose_prefill=choose, choose_decode=choose,
            random=self.random, adapters=catalogue,
        )  # fmt: skip

        def make_link(on_message: OnMessage, *_: object) -> FakeLink:
            return FakeLink(self, on_message)

        with mock.patch("router.service.NodeLink", make_link):
            self.service = RouterService(
                registry, dispatcher, RouterMetrics(), adapters=catalogue,
                adapter_limits=AdapterLimits(), heartbeat_s=1.0, admin_timeout_s=1e6,
                asked_to_end=asyncio.Event(), clock=lambda: self.now,
            )  # fmt: skip
        link = self.service._link
        assert isinstance(link, FakeLink)
        self.link = link

    def turn(self, call: Callable[[], Any] = lambda: None) -> Any:
        """Do something inside the loop, and let everything come to rest."""

        async def act() -> Any:
            done = call()
            for _ in range(20):
                await asyncio.sleep(0)
            return done

        return self.loop.run_until_complete(act())

    def close(self) -> None:
        self.loop.run_until_complete(self.service.adapter_verbs.close(0.0))
        self.loop.close()

    # ------------------------------------------------------------ nodes

    def is_there(self, slot: str) -> SimNode | None:
        return next((node for node in self.living.values() if node.slot == slot), None)

    def join(self, slot: str) -> None:
        self.born += 1
        disk = {f"/{name}": f"{name}1" for name in NAMES}
        node = SimNode(slot, f"{slot}.{self.born}", disk)
        self.living[node.incarnation] = node
        self.greet(node)

    def greet(self, node: SimNode) -> None:
        role = DisaggregationMode.PREFILL if node.slot[0] == "p" else DisaggregationMode.DECODE
        node.cut, node.seq = False, 0
        node.rooms.clear()
        self.say(node, hello(role, node.slot, num_pages=1000))

    def say(self, node: SimNode, body: ToRouter) -> None:
        node.seq += 1
        if not node.cut:
            to = "" if isinstance(body, Hello) else ME
            envelope = Envelope(node.incarnation, to, node.seq, body)
            self.link.on_message(node.incarnation.encode(), envelope)

    def lose(self, node: SimNode, *, dead: bool) -> None:
        """Its link breaks; the router notices at its next message."""
        node.cut = True
        if dead:
            del self.living[node.incarnation]
        self.service._send_all([])  # nothing; the ping below is what fails
        self.service._ping(self.now)

    def list(self, node: SimNode) -> None:
        infos = [
            AdapterInfo(name=name, digest=digest, path=f"/{name}", rank=8)
            for name, digest in node.holds.items()
        ]
        self.say(node, NodeAdapters(infos))

    def work(self, node: SimNode) -> None:
        """It does the oldest thing it was told."""
        if not node.inbox:
            return
        match node.inbox.popleft():
            case Welcome(reset=reset):
                if reset:
                    node.rooms.clear()
                self.list(node)
            case Ping(stamp) if stamp == 0.0:
                self.greet(node)
            case Admin(id=ticket, verb=LoadAdapter() as verb):
                self._load(node, ticket, verb)
            case Admin(id=ticket, verb=UnloadAdapter(name)):
                ok = node.holds.pop(name, None) is not None
                self.list(node)
                self.say(node, AdminReply(id=ticket, ok=ok, message="" if ok else "never loaded"))
            case Generate() as generate:
                self._take(node, generate)
            case Abort(room):
                node.rooms.pop(room, None)
            case _:
                pass

    def _load(self, node: SimNode, ticket: int, verb: LoadAdapter) -> None:
        held, found = node.holds.get(verb.name), node.disk[verb.path]
        ok = held == verb.digest if held is not None else verb.digest in ("", found)
        if ok:
            node.holds[verb.name] = held or found
            self.list(node)
        digest = node.holds[verb.name] if ok else ""
        self.say(node, AdminReply(id=ticket, ok=ok, message="" if ok else "no", digest=digest))

    def _take(self, node: SimNode, generate: Generate) -> None:
        adapter = generate.adapter
        if adapter is not None and node.holds.get(adapter.name) != adapter.digest:
            failed = Failed(room=generate.room, kind=FailureKind.ADAPTER, message="not here")
            self.say(node, failed)
        else:
            node.rooms[generate.room] = generate

    def finish(self, node: SimNode) -> None:
        """A decode node ends all that it runs."""
        for room in list(node.rooms):
            index = len(node.rooms.pop(room).output_ids)
            output = TokenOutput(room=room, index=index, token_ids=[7], finish=StopReason.STOP)
            self.say(node, Tokens([output]))

    def check_half(self, node: SimNode, generate: Generate) -> None:
        known = self.service.registry.get(node.incarnation)
        assert known is not None
        assert known.takes_work
        listed = {Adapter(i.name, i.digest) for i in (known.adapters or {}).values()}
        assert generate.adapter in {None, *listed}, f"{node.incarnation} is no candidate"
        first = self.halves.setdefault(generate.room, generate.adapter)
        assert first == generate.adapter, "one attempt, two adapters"

    # ------------------------------------------------------------ clients

    def submit(self, adapter: Adapter | None) -> Job | None:
        sampling = SamplingParams(max_tokens=4, seed=1)
        choice = ChoiceSpec([5, 6], sampling, TextOptions(), adapter)
        with self.service.arrivals.open() as arrival, suppress(ApiError):  # 404 or 503
            arrival.rid = "r"
            return self.service.submit(arrival, DEFAULT_TERMS, [choice], [Ear()])[0]
        return None
