"""The in-process twin of the NIXL backend: real copies between pools, faults at will.

Nothing happens by itself. A `MemoryFabric` connects the backends of one process, counts steps as
its only time and moves every posted write on at each `step`; with `auto_step` each `poll` makes
one. All choices come from its seed, so a run repeats exactly. A write copies its pages one by one,
in a random order, over the steps until it is due: whoever frees or reads a page too early gets
wrong bytes, as on a network.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.messages import Incarnation, PeerMemory
from common.plan import TransferCommand, TransferEvent, Write
from transfer.boxes import Boxes
from transfer.courier import Fence, fenced, refusals
from transfer.fences import FencedCourier
from transfer.handshake import heads_of
from transfer.layout import check_layout, common_rows, page_rows
from transfer.poster import Poster, WriteState
from transfer.stage import PageStage
from transfer.staging import StagedCourier, inner_memory, stage_area

CLOSED = "this node's transfer is closed"


@dataclass(frozen=True, slots=True)
class Faults:
    """What happens to the writes posted from now on; probabilities are drawn per write."""

    delay: tuple[int, int] = (0, 0)
    """Least and most steps between the post and the landing; unequal delays reorder writes."""
    failure: float = 0.0
    """The connection breaks under the write; some of its pages have been copied."""
    hang: float = 0.0
    """Neither lands nor fails until `land_hung`, or until either side dies."""
    lost_acknowledgement: float = 0.0
    """Lands and notifies, yet its sender is told that the connection broke."""


@dataclass(slots=True)
class Endpoint:
    """One backend's place in the fabric."""

    name: str
    pool: memoryview
    """What peers may write to."""
    base_address: int
    boxes: Boxes | None = None
    inbox: list[bytes] = field(default_factory=list)
    wake: Callable[[], None] | None = None

    def part(self, address: int, length: int) -> memoryview:
        return self.pool[address - self.base_address :][:length]


@dataclass(slots=True, eq=False)
class Flight:
    """A posted write, a look into boxes, or a notification alone."""

    source: Endpoint
    target: str
    notification: bytes
    remaining: list[tuple[int, int, int]]
    """What is not copied yet: source address, target address, length."""
    due: int
    fails: bool
    hangs: bool
    acknowledged: bool
    boxes: tuple[int, ...]
    """To be read."""
    words: list[int] = field(default_factory=list)
    state: WriteState = WriteState.POSTED
    error: str = ""


class MemoryFabric:
    """The network between the `MemoryTransfer`s of one process; several threads may use it."""

    def __init__(
        self, seed: int = 0, faults: Faults | None = None, *, auto_step: bool = True
    ) -> None:
        self.faults = faults or Faults()
        """Assign another one at any time."""
        self.auto_step = auto_step
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._endpoints: dict[str, Endpoint] = {}
        self._flights: list[Flight] = []
        self._now = 0

    @property
    def num_flights(self) -> int:
        """Writes that are posted and have not ended."""
        return len(self._flights)

    def step(self) -> None:
        """One unit of time: each posted write copies a page, or ends if it is due."""
        with self.lock:
            self._now += 1
            flights = list(self._flights)
            self._random.shuffle(flights)
            for flight in flights:
                self._advance(flight)

    def land_hung(self) -> int:
        """Let hung writes go on, as a stopped process does that is continued; says how many."""
        with self.lock:
            hung = [flight for flight in self._flights if flight.hangs]
            for flight in hung:
                flight.hangs = False
            return len(hung)

    def kill(self, agent_name: str) -> None:
        """An agent's process is gone: writes into it break, its own stop where they are."""
        with self.lock:
            self.detach(agent_name)

    # ------------------------------------------------------------ for the backends

    def attach(self, endpoint: Endpoint) -> None:
        with self.lock:
            if endpoint.name in self._endpoints:
                raise ValueError(f"agent {endpoint.name!r} exists already")
            self._endpoints[endpoint.name] = endpoint

    def detach(self, agent_name: str) -> None:
        with self.lock:
            self._endpoints.pop(agent_name, None)
            self._flights = [f for f in self._flights if f.source.name != agent_name]

    def is_attached(self, agent_name: str) -> bool:
        return agent_name in self._endpoints

    def post(
        self,
        source: Endpoint,
        target: str,
        parts: list[tuple[int, int, int]],
        notification: bytes,
        boxes: tuple[int, ...] = (),
    ) -> Flight:
        """`parts` and `boxes` as in `Flight`. Raises ConnectionError if either side is gone."""
        with self.lock:
            for name in (source.name, target):
                if name not in self._endpoints:
                    raise ConnectionError(f"agent {name!r} is gone")
            faults, draw = self.faults, self._random
            draw.shuffle(parts)
            flight = Flight(
                source,
                target,
                notification,
                parts,
                due=self._now + draw.randint(*faults.delay),
                fails=draw.random() < faults.failure,
                hangs=draw.random() < faults.hang,
                acknowledged=draw.random() >= faults.lost_acknowledgement,
                boxes=boxes,
            )
            self._flights.append(flight)
            return flight

    # ------------------------------------------------------------ movement

    def _advance(self, flight: Flight) -> None:
        target = self._endpoints.get(flight.target)
        if target is None:
            self._end(flight, f"agent {flight.target!r} is gone")
        elif flight.hangs:
            return
        elif self._now < flight.due:
            if len(flight.remaining) > 1:
                self._copy(flight, target)
        elif flight.fails:
            for _ in range(self._random.randrange(len(flight.remaining) + 1)):
                self._copy(flight, target)
            self._end(flight, "the connection broke (planted)")
        else:
            while flight.remaining:
                self._copy(flight, target)
            self._arrive(flight, target)
            lost = "the connection broke (planted) after the bytes"
            self._end(flight, None if flight.acknowledged else lost)

    def _arrive(self, flight: Flight, target: Endpoint) -> None:
        """All its bytes are in place."""
        if flight.boxes:
            assert target.boxes is not None, "nobody looks into boxes that were not described"
            flight.words = [int(target.boxes.words[box]) for box in flight.boxes]
        if flight.notification:
            target.inbox.append(flight.notification)
            if target.wake is not None:
                target.wake()

    def _copy(self, flight: Flight, target: Endpoint) -> None:
        here, there, length = flight.remaining.pop()
        target.part(there, length)[:] = flight.source.part(here, length)

    def _end(self, flight: Flight, error: str | None) -> None:
        self._flights.remove(flight)
        flight.state = WriteState.LANDED if error is None else WriteState.BROKEN
        flight.error = error or ""
        if flight.source.wake is not None:
            flight.source.wake()


class MemoryAgent:
    """The write primitives over a fabric."""

    def __init__(
        self, fabric: MemoryFabric, endpoint: Endpoint, memory: PeerMemory, num_layers: int
    ) -> None:
        self._fabric = fabric
        self._endpoint = endpoint
        self._memory = memory
        self._num_layers = num_layers

    @staticmethod
    def metadata(agent_name: str) -> bytes:
        return b"memory:" + agent_name.encode()

    def add_peer(self, memory: PeerMemory) -> None:
        if memory.metadata != self.metadata(memory.agent_name):
            raise ValueError("the agent metadata is damaged")
        if not self._fabric.is_attached(memory.agent_name):
            raise ConnectionError(f"agent {memory.agent_name!r} is gone")

    def remove_peer(self, memory: PeerMemory) -> None:
        """A fabric keeps nothing for a pair of agents."""

    def post(self, memory: PeerMemory, write: Write) -> Flight:
        pages = write.source_pages, write.target_pages
        if heads_of(memory) == heads_of(self._memory):
            local, remote = page_rows(self._memory, pages[0]), page_rows(memory, pages[1])
        else:
            local, remote = common_rows(self._memory, memory, self._num_layers, *pages)
        here, there = local.tolist(), remote.tolist()
        parts = [(h[0], t[0], h[1]) for h, t in zip(here, there, strict=True)]
        return self._fabric.post(self._endpoint, memory.agent_name, parts, write.notification)

    def notify(self, memory: PeerMemory, payload: bytes) -> None:
        """Nobody is told if it is lost."""
        self._fabric.post(self._endpoint, memory.agent_name, [], payload)

    def look(self, memory: PeerMemory, boxes: Sequence[int]) -> Flight:
        return self._fabric.post(self._endpoint, memory.agent_name, [], b"", tuple(boxes))

    def words(self, handle: Flight) -> Sequence[int]:
        return handle.words

    def state(self, handle: Flight) -> WriteState:
        return handle.state

    def error(self, handle: Flight) -> str:
        return handle.error

    def notifications(self) -> list[bytes]:
        arrived, self._endpoint.inbox = self._endpoint.inbox, []
        return arrived


class MemoryTransfer:
    """A `TransferBackend` without threads: work is done inside `submit`, `poll` and `fabric.step`.

    `pool` is writable bytes, `num_pages * page_bytes` of them (a numpy array's or a bytearray's
    view), laid out as `transfer.layout` says, with the KV heads `first_head`, ... of the model's.
    `clock` judges leases only.
    """

    def __init__(
        self,
        fabric: MemoryFabric,
        pool: memoryview,
        page_bytes: int,
        incarnation: Incarnation,
        clock: Callable[[], float] = time.monotonic,
        *,
        num_layers: int = 1,
        first_head: int = 0,
        num_heads: int = 1,
        fence: Fence | None = None,
        stage: PageStage | None = None,
    ) -> None:
        flat = pool.cast("B")
        if flat.readonly or len(flat) % page_bytes or not len(flat):
            raise ValueError(f"{len(flat)} bytes are not writable pages of {page_bytes}")
        name = f"pdserve-{incarnation}"
        num_pages = len(flat) // page_bytes
        boxes = None if stage is None else Boxes(num_pages, num_heads)
        # A stand-in for an address: 0 would be no usable pool.
        self._memory = PeerMemory(
            agent_name=name,
            metadata=MemoryAgent.metadata(name),
            base_address=page_bytes,
            num_pages=num_pages,
            page_bytes=page_bytes,
            first_head=first_head,
            num_heads=num_heads,
            stage=stage_area(stage, boxes),
        )
        check_layout(self._memory, num_layers)
        self._fabric = fabric
        self._fence = fence
        inner = inner_memory(self._memory)
        reached = flat if stage is None else stage.buffer
        self._endpoint = Endpoint(name, reached, inner.base_address, boxes)
        poster = Poster(MemoryAgent(fabric, self._endpoint, inner, num_layers), inner, clock)
        self._courier = FencedCourier(StagedCourier(poster, self._memory, clock, stage, boxes))
        self._refused: list[TransferEvent] = []
        self._closed = False
        fabric.attach(self._endpoint)

    @property
    def memories(self) -> tuple[PeerMemory, ...]:
        return (self._memory,)

    def start(self, wake: Callable[[], None]) -> None:
        self._endpoint.wake = wake

    def submit(self, commands: Sequence[TransferCommand]) -> None:
        with self._fabric.lock:
            if self._closed:
                self._refused += refusals(commands, CLOSED)
            else:
                for order in fenced(commands, self._fence):
                    self._courier.handle(order)
        self._wake()

    def poll(self) -> list[TransferEvent]:
        with self._fabric.lock:
            if not self._closed:
                if self._fabric.auto_step:
                    self._fabric.step()
                self._courier.progress()
                if self._fabric.auto_step and self._courier.num_open:
                    self._wake()  # time passes only in polls: come back
            refused, self._refused = self._refused, []
            return self._courier.take_events() + refused

    def close(self) -> None:
        with self._fabric.lock:
            if self._closed:
                return
            self._courier.stop(CLOSED)
            self._courier.progress()
            self._fabric.detach(self._endpoint.name)
            self._courier.abandon(CLOSED)
            self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._endpoint.wake is not None:
            self._endpoint.wake()
