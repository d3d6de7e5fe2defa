"""Nodes of which some stage, whose only clock is `step`: every fault of a network, repeatably."""

from dataclasses import dataclass, field

import numpy as np

from common.plan import (
    AddPeer,
    Notified,
    PeerAdded,
    RenewLease,
    TransferEvent,
    WriteDone,
    WriteFailed,
)
from tests.unit.transfer.rig import NUM_HEADS, NUM_LAYERS, PAGE_BYTES, TILE_BYTES, filled_pool
from tests.unit.transfer.slow_stage import Pages, SlowStage
from transfer.memory import Faults, Flight, MemoryFabric, MemoryTransfer
from transfer.slots import Direction, Slots
from transfer.staging import StagedCourier

STEP_S = 0.01
LEASE_S = 1e6


@dataclass(eq=False)
class Node:
    name: str
    pool: Pages
    """[pages, PAGE_BYTES]."""
    stage: SlowStage | None
    transfer: MemoryTransfer
    events: list[TransferEvent] = field(default_factory=list)

    @property
    def notified(self) -> list[bytes]:
        return [event.payload for event in self.events if isinstance(event, Notified)]

    @property
    def ends(self) -> dict[int, WriteDone | WriteFailed]:
        """By room; two ends of one write are an error."""
        found: dict[int, WriteDone | WriteFailed] = {}
        for event in self.events:
            if isinstance(event, WriteDone | WriteFailed):
                assert event.room not in found, f"{event.room} ended twice: {self.events}"
                found[event.room] = event
        return found

    def held(self, direction: Direction) -> int:
        """Slots of its ring that are not free."""
        return self.slots._held[direction]

    @property
    def staging(self) -> StagedCourier[Flight]:
        courier = self.transfer._courier._inner
        assert isinstance(courier, StagedCourier)
        return courier

    @property
    def slots(self) -> Slots:
        slots = self.staging._sender.slots
        assert slots is not None
        return slots


class Net:
    def __init__(self, faults: Faults | None = None, seed: int = 0) -> None:
        self.now = 0.0
        self.fabric = MemoryFabric(seed, faults, auto_step=False)
        self.nodes: list[Node] = []

    def add(
        self, name: str, *, staged: bool = True, num_slots: int = 16, num_pages: int = 64
    ) -> Node:
        pool = filled_pool(len(self.nodes), num_pages)
        shaped = pool.reshape(num_pages, NUM_LAYERS, 2, NUM_HEADS, TILE_BYTES)
        stage = SlowStage(shaped, num_slots) if staged else None
        transfer = MemoryTransfer(
            self.fabric,
            pool.reshape(-1).data,
            PAGE_BYTES,
            name,
            lambda: self.now,
            num_layers=NUM_LAYERS,
            num_heads=NUM_HEADS,
            stage=stage,
        )
        self.nodes.append(Node(name, pool, stage, transfer))
        return self.nodes[-1]

    def link(self, source: Node, target: Node, lease_s: float = LEASE_S) -> None:
        renew = RenewLease(target.name, self.now + lease_s)
        source.transfer.submit([AddPeer(target.name, target.transfer.memories), renew])
        self.step()
        assert source.events[-1] == PeerAdded(target.name)

    def step(self, count: int = 1, *, without: Node | None = None) -> None:
        """Time passes; a node that is left out is stopped."""
        for _ in range(count):
            self.now += STEP_S
            self.fabric.step()
            for node in self.nodes:
                if node is not without:
                    node.events += node.transfer.poll()

    def until_quiet(self, most: int = 2000) -> int:
        """Step until nobody has anything open; how long that took."""
        for step in range(most):
            self.step()
            if not any(node.transfer._courier.num_open for node in self.nodes):
                return step
        raise AssertionError(f"not quiet: {[node.events for node in self.nodes]}")


def pages_equal(
    source: Node, sources: tuple[int, ...], target: Node, targets: tuple[int, ...]
) -> bool:
    return bool(np.array_equal(source.pool[list(sources)], target.pool[list(targets)]))
