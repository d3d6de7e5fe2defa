"""One scheduler by itself, driven message by message."""

from typing import Any

from common.events import AdminDone, FromPeer, FromRouter
from common.messages import (
    Adapter,
    ChunkLanded,
    Destination,
    Failed,
    FailureKind,
    FirstToken,
    Generate,
    LoadAdapter,
    PeerHello,
    PeerMemory,
    PeerWelcome,
    SamplingParams,
    TokenLogprob,
    UnloadAdapter,
    encode,
)
from common.plan import (
    AdapterCommand,
    AdapterEvent,
    AdapterFailed,
    AdapterPlaced,
    AdapterRead,
    Batch,
    BatchResult,
    DropAdapter,
    Notified,
    PeerAdded,
    ReadAdapter,
    Sample,
    StepPlan,
    ToPeerMsg,
    ToRouterMsg,
)
from common.scheduler import Scheduler
from decode_node.scheduler import DecodeScheduler
from prefill_node.scheduler import PrefillScheduler
from tests.unit.scheduler.node_settings import FINGERPRINT, PAGE_BYTES, settings

MEMORY = PeerMemory(
    agent_name="d",
    metadata=b"",
    base_address=1,
    num_pages=99,
    page_bytes=PAGE_BYTES,
    first_head=0,
    num_heads=1,
)
HELLO = PeerHello(fingerprint=FINGERPRINT, memories=(MEMORY,), lease_s=4.0)


def generate(room: int, prompt: int = 6, max_tokens: int = 8, **fields: Any) -> Generate:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, stop_token_ids=fields.pop("stop", ()))
    values: dict[str, Any] = {
        "room": room,
        "rid": f"rid-{room}",
        "attempt": 1,
        "prompt_ids": list(range(prompt)),
        "output_ids": [],
        "sampling": sampling,
        "prefill_incarnation": "p",
        "prefill_address": "tcp://p",
    }
    return Generate(**values | fields)


class Driven:
    """A scheduler with a clock; keeps what its plans said."""

    def __init__(self, scheduler: Scheduler[Any]) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.transfers: list[Any] = []
        self.to_router: list[Any] = []
        self.to_peer: list[Any] = []
        self.commands: list[AdapterCommand] = []
        self.answers: list[AdminDone] = []

    def router(self, body: Any, router: str = "r") -> None:
        self.scheduler.handle(FromRouter(router, body), self.now)

    def peer(self, body: Any, peer: str) -> None:
        """A message on the link that stands, or that a handshake opens."""
        link = 1
        if isinstance(self.scheduler, DecodeScheduler):
            found = self.scheduler.links._links.get(peer)
            link = 0 if found is None else found.number
        self.scheduler.handle(FromPeer(peer, link, body), self.now)

    def fact(self, event: Any) -> None:
        self.scheduler.on_transfer(event, self.now)

    def step(self, token: int = 5) -> StepPlan:
        """One turn; each sampling row draws `token`, a prompt token's logprob is minus its id."""
        plan = self.decide()
        if plan.batch is not None:
            self.take_in(plan.batch, token)
        return plan

    def decide(self) -> StepPlan:
        """The first half of a turn. What is decided twice is in flight twice."""
        plan = self.scheduler.schedule(self.now)
        self.transfers += plan.transfers
        self.commands += plan.adapters
        self.answers += plan.answers
        self.to_router += [m.body for m in plan.messages if isinstance(m, ToRouterMsg)]
        self.to_peer += [m.body for m in plan.messages if isinstance(m, ToPeerMsg)]
        self.scheduler.check_invariants()
        return plan

    def take_in(self, batch: Batch | None, token: int = 5) -> None:
        """The second half, for the oldest batch in flight."""
        assert batch is not None
        drawn = [None if r.sample_index is None else Sample(token) for r in batch.rows]
        scores = [tuple(TokenLogprob(-i) for i in r.next_ids) for r in batch.rows]
        self.scheduler.process_batch_result(BatchResult(tuple(drawn), tuple(scores)), self.now)
        self.scheduler.check_invariants()

    def load(self, name: str, ticket: int = 0, **fields: Any) -> None:
        verb = LoadAdapter(name=name, **{"path": f"/{name}"} | fields)
        self.scheduler.change_adapters(ticket, verb)

    def unload(self, name: str, ticket: int = 0) -> None:
        self.scheduler.change_adapters(ticket, UnloadAdapter(name))

    def loader(self, error: str | None = None) -> None:
        """The loader has carried out what it was given: as asked, or it all failed. A path's
        content is its name."""
        commands, self.commands = self.commands, []
        for command in commands:
            if isinstance(command, DropAdapter):
                continue
            event: AdapterEvent
            if error is not None:
                event = AdapterFailed(command.adapter, error)
            elif isinstance(command, ReadAdapter):
                event = AdapterRead(command.adapter, f"digest of {command.path}", rank=4)
            else:
                event = AdapterPlaced(command.adapter, command.slot)
            self.scheduler.on_adapter(event, self.now)

    def serve(self, *names: str, **fields: Any) -> None:
        """Load adapters, and forget what was said of it."""
        self.answers.clear()
        for name in names:
            self.load(name, **fields)
            for _ in range(3):
                self.step()
                self.loader()
        self.step()
        assert all(done.ok for done in self.answers), self.answers
        self.answers.clear()
        self.commands.clear()

    def failures(self, kind: FailureKind) -> list[int]:
        return [failed.room for failed in self.said(Failed) if failed.kind is kind]

    def said(self, kind: type) -> list[Any]:
        return [m for m in (*self.to_router, *self.to_peer) if isinstance(m, kind)]

    def sent(self, kind: type) -> list[Any]:
        return [command for command in self.transfers if isinstance(command, kind)]


def prefill(num_pages: int = 24, **overrides: Any) -> Driven:
    """A prefill node linked to decode `d`."""
    driven = Driven(PrefillScheduler(settings("p", num_pages, **overrides), PAGE_BYTES))
    driven.peer(HELLO, "d")
    driven.fact(PeerAdded("d"))
    driven.step()
    assert driven.said(PeerWelcome)
    return driven


def adapter(name: str) -> Adapter:
    """As it is after `Driven.serve(name)`."""
    return Adapter(name, f"digest of /{name}")


def destination(room: int, pages: int = 2, first: int = 0, name: str = "") -> Destination:
    """`name`: of the request's adapter."""
    digest = adapter(name).digest if name else ""
    return Destination(room=room, pages=list(range(first, first + pages)), adapter=digest)


def decode(num_pages: int = 24, **overrides: Any) -> Driven:
    """A decode node; its first request for prefill `p` finds the link welcomed after one step."""
    return Driven(DecodeScheduler(settings("d", num_pages, **overrides), reserve_pages=0))


def landed(room: int, chunk: int = 0, total: int = 1, token: int = 3, **fields: Any) -> Notified:
    last = FirstToken(total_chunks=total, token_id=token) if chunk == total - 1 else None
    values: dict[str, Any] = {"source": "p", "target": "d", "pages": [], "last": last}
    return Notified(encode(ChunkLanded(room=room, chunk=chunk, **values | fields)))


def running(driven: Driven, *rooms: int, **fields: Any) -> None:
    """Bring requests into decode's running batch."""
    for room in rooms:
        driven.router(generate(room, **fields))
    driven.step()
    driven.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    driven.step()
    for room in rooms:
        driven.fact(landed(room))
    driven.step()
