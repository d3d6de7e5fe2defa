"""A dispatcher with nodes that only exist as registry entries, and a clock in the test's hand."""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

import msgspec

from common.messages import (
    WIRE_VERSION,
    Abort,
    Adapter,
    AdapterInfo,
    CacheUpdate,
    Envelope,
    Failed,
    FailureKind,
    Fingerprint,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    NodeAdapters,
    NodeState,
    NodeStats,
    SamplingParams,
    StopReason,
    TokenLogprob,
    TokenOutput,
    ToRouter,
)
from common.modes import DisaggregationMode
from router.adapters import AdapterCatalogue
from router.admission import Demand
from router.cache_index import CacheIndex
from router.config import PolicyName
from router.dispatcher import Dispatcher
from router.limits import Limits
from router.local_prefill import LocalLimits
from router.node import Loss, Node
from router.nodes import NodeRegistry
from router.page_keys import Lineage, PageKeys
from router.policies import COMPUTE_WEIGHT, make_choice
from router.protocol.terms import DEFAULT_TERMS, Terms
from router.requests import Attempt, Job, JobAborted, JobFailed, NewTokens, Output

ME = "router"
NEVER_LOCAL = LocalLimits(tokens=0, share=1.0)
FINGERPRINT = Fingerprint(
    wire_version=WIRE_VERSION,
    model="m",
    dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_dim=4,
    page_size=16,
)
Message = TypeVar("Message")


def hello(
    role: DisaggregationMode,
    name: str,
    *,
    num_pages: int = 64,
    max_running_requests: int = 64,
    **fingerprint: object,
) -> Hello:
    return Hello(
        role=role,
        name=name,
        url="http://node",
        pid=1,
        served_model_name="m",
        fingerprint=msgspec.structs.replace(FINGERPRINT, **fingerprint),
        max_model_len=512,
        max_running_requests=max_running_requests,
        num_pages=num_pages,
        side_channel=f"tcp://{name}",
    )


@dataclass
class Ear:
    """Remembers what a listener was told."""

    outputs: list[Output] = field(default_factory=list)

    def deliver(self, output: Output) -> None:
        assert not self.ended, "something came after the end"
        self.outputs.append(output)

    @property
    def tokens(self) -> list[int]:
        return [t for out in self.outputs if isinstance(out, NewTokens) for t in out.token_ids]

    @property
    def message(self) -> str:
        """What it was told at its end."""
        match self.outputs[-1]:
            case JobAborted(message):
                return message
            case JobFailed(error):
                return error.message
            case _:
                return ""

    @property
    def ended(self) -> str | None:
        """How it ended, or None."""
        match self.outputs[-1:]:
            case [NewTokens(finish=finish)] if finish is not None:
                return finish.value
            case [JobAborted()]:
                return "abort"
            case [JobFailed(error)]:
                return str(error.status)
            case _:
                return None


class Desk:
    """Nodes are named p1, p2, ..., d1, d2, ...; their incarnation is their name."""

    def __init__(
        self,
        nodes: str = "p1 d1",
        *,
        decode_alone: bool = False,
        policy: PolicyName = "round_robin",
        **limits: object,
    ) -> None:
        """Every attempt is on a pair of nodes, unless `decode_alone` or limits (`local`) say
        otherwise."""
        self.now = 100.0
        self.registry = NodeRegistry(ME, timeout_s=3.0, decode_alone=decode_alone)
        defaults = {"local": NEVER_LOCAL, "waits_for_cached": policy == "cache_aware"}
        limits = defaults | limits
        self.adapters = AdapterCatalogue()
        self.cache = CacheIndex(max_pages=1_000_000)
        self._cache_seq: Counter[str] = Counter()
        self.dispatcher = Dispatcher(
            self.registry,
            Limits(**limits),  # type: ignore[arg-type]
            choose_prefill=make_choice(policy, Random(7), COMPUTE_WEIGHT),
            choose_decode=make_choice(policy, Random(8)),
            random=Random(7),
            adapters=self.adapters,
            cache=self.cache,
        )
        self.sent: list[tuple[str, object]] = []
        for name in nodes.split():
            self.join(name)

    # ------------------------------------------------------------ nodes

    def join(self, name: str, **settings: object) -> None:
        """`settings` are those of `hello`."""
        role = DisaggregationMode.PREFILL if name[0] == "p" else DisaggregationMode.DECODE
        self.say(name, hello(role, name, **settings), to="", seq=1)  # type: ignore[arg-type]
        self.adapters_of(name)
        self.cache.join(name, self.registry_node(name).hello.num_pages)

    def caches(self, name: str, token_ids: list[int]) -> None:
        """A node says that it has cached the full pages of these tokens, but for what it had."""
        lineage = Lineage(FINGERPRINT, "")
        keys = PageKeys().of_prefix(lineage, [*token_ids, 0])
        new = keys[self.cache.match(keys).get(name, 0) :]
        self._cache_seq[name] += 1
        stored = array("Q", new).tobytes()
        update = CacheUpdate(seq=self._cache_seq[name], stored=stored)
        self.cache.on_update(name, update, self.now)
        while self.cache.work():
            pass

    def adapters_of(self, name: str, *adapters: Adapter) -> None:
        """A node lists what it can serve."""
        infos = [AdapterInfo(name=a.name, digest=a.digest, path="/a", rank=8) for a in adapters]
        self.say(name, NodeAdapters(infos))
        self.adapters.on_list(name, infos)
        self.dispatcher.dispatch(self.now)
        self.settle()

    def registry_node(self, name: str) -> Node:
        node = self.registry.get(name)
        assert node is not None
        return node

    def say(self, name: str, body: ToRouter, to: str = ME, seq: int | None = None) -> None:
        """Something that concerns the registry only."""
        node = self.registry.get(name)
        number = seq or (node.next_from if node is not None else 1)
        self.registry.receive(name.encode(), Envelope(name, to, number, body), self.now)

    def set_state(self, name: str, state: NodeState) -> None:
        self.beat(name, state=state)
        self.tick()

    def beat(self, name: str, **stats: object) -> None:
        """A heartbeat with these numbers."""
        told = NodeStats(**stats)  # type: ignore[arg-type]
        self.say(name, Heartbeat(stats=told, step_age_s=0.0))
        self.dispatcher.on_heartbeat(name, self.now)
        self.settle()

    def lose(self, name: str, loss: Loss) -> None:
        if loss in (Loss.LEFT, Loss.SILENT):
            self.say(name, Goodbye())
        if loss is Loss.UNREACHABLE:
            self.registry.unreachable(name)
        if loss is not Loss.GAP:
            self.adapters.on_loss(name)
        self.dispatcher.on_node_loss(name, loss, self.now)
        self.settle()

    # ------------------------------------------------------------ requests

    def check(
        self,
        prompt: int = 3,
        *,
        choices: int = 1,
        priority: int = 0,
        kv: int = 0,
        adapter: Adapter | None = None,
    ) -> None:
        """Ask for room as the service does."""
        adapters = frozenset() if adapter is None else frozenset({adapter})
        demand = Demand(choices=choices, prompt_tokens=prompt, kv_tokens=kv, adapters=adapters)
        self.dispatcher.check_room_for(demand, priority, self.now)

    def submit(
        self,
        rid: str = "r",
        max_tokens: int = 8,
        *,
        prompt: int = 3,
        terms: Terms = DEFAULT_TERMS,
        arrived: float | None = None,
        adapter: Adapter | None = None,
        token_ids: list[int] | None = None,
        **sampling: object,
    ) -> Job:
        """`token_ids`: the prompt, if more matters than that it has `prompt` tokens."""
        params = SamplingParams(max_tokens=max_tokens, seed=1, **sampling)  # type: ignore[arg-type]
        ids = token_ids or [5 + i % 3 for i in range(prompt)]
        job = self.dispatcher.submit(
            rid, "", ids, params, Ear(), self.now, terms=terms, arrived=arrived, adapter=adapter
        )
        self.settle()
        return job

    def tokens(
        self,
        node: str,
        room: int,
        index: int,
        *token_ids: int,
        finish: StopReason | None = None,
        logprobs: list[TokenLogprob] | None = None,
        cached_tokens: int = 0,
        prompt_logprobs: list[TokenLogprob] | None = None,
    ) -> None:
        output = TokenOutput(
            room=room,
            index=index,
            token_ids=list(token_ids),
            finish=finish,
            logprobs=logprobs,
            cached_tokens=cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )
        self.dispatcher.on_tokens(node, [output], self.now)
        self.settle()

    def retract(self, node: str, room: int) -> None:
        self.dispatcher.on_retracted(node, room, self.now)
        self.settle()

    def fail(self, node: str, room: int, kind: FailureKind) -> None:
        self.dispatcher.on_failed(node, Failed(room=room, kind=kind, message="why"), self.now)
        self.settle()

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.dispatcher.tick(self.now)
        self.settle()

    def settle(self) -> None:
        effects = self.dispatcher.drain()
        self.sent += [(send.node, send.body) for send in effects.sends]
        for delivery in effects.deliveries:
            delivery.job.listener.deliver(delivery.output)

    # ------------------------------------------------------------ what to look at

    def generates(self, node: str) -> list[Generate]:
        return [body for to, body in self.sent if to == node and isinstance(body, Generate)]

    def aborts(self, node: str) -> list[int]:
        return [body.room for to, body in self.sent if to == node and isinstance(body, Abort)]


def attempt(job: Job) -> Attempt:
    assert job.attempt is not None, f"{job.state}"
    return job.attempt


def room(job: Job) -> int:
    return attempt(job).room


def ear(job: Job) -> Ear:
    assert isinstance(job.listener, Ear)
    return job.listener
