"""A node's other rank as a process of its own, over NIXL, that is killed while it writes."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from common.messages import PeerMemory
from common.plan import (
    AddPeer,
    Notified,
    PeerAdded,
    PieceLanded,
    RenewLease,
    TransferEvent,
    Write,
    WriteDone,
    WriteFailed,
)
from common.rank_channel import RankChannel
from transfer.nixl import NixlTransfer
from transfer.rank_transfer import RemoteTransfer, serve_transfer
from transfer.sharded import ShardedTransfer

NUM_LAYERS, NUM_HEADS, TILE_BYTES, NUM_PAGES = 4, 2, 32 << 10, 64
WRITES, MANY = 40, 600
PAGES_A_WRITE = 4
TIMEOUT_S = 60.0

Part = npt.NDArray[np.uint8]
"""[NUM_PAGES, NUM_LAYERS, 2, heads, TILE_BYTES]."""


def filled(heads: int, first: int, seed: int) -> Part:
    shape = NUM_PAGES, NUM_LAYERS, 2, NUM_HEADS, TILE_BYTES
    whole = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return whole[:, :, :, first : first + heads].copy()


def registered(part: Part, name: str, first_head: int) -> NixlTransfer:
    return NixlTransfer(
        part.ctypes.data,
        NUM_PAGES,
        part[0].nbytes,
        name,
        {},
        num_layers=NUM_LAYERS,
        first_head=first_head,
        num_heads=part.shape[3],
    )


def be_rank_one(pipe: "Connection[Any, Any]", node: str, seed: int) -> None:
    """The rank's process: the second head of each page; until rank 0 is gone."""
    part = filled(1, 1, seed)
    backend = registered(part, f"{node}-rank1", 1)
    pipe.send(backend.memories[0])
    channel, over = RankChannel(pipe), threading.Event()
    serve_transfer(channel, backend)
    channel.start(over.set)
    over.wait()


class Node:
    """A node of two ranks; what the second says goes by its channel."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.rank = context.Process(target=be_rank_one, args=(theirs, name, seed), daemon=True)
        self.rank.start()
        theirs.close()
        self.part = filled(1, 0, seed)
        local = registered(self.part, f"{name}-rank0", 0)
        assert ours.poll(TIMEOUT_S)
        memory: PeerMemory = ours.recv()
        channel = RankChannel(ours)
        self.lost = threading.Event()
        self.transfer = ShardedTransfer([local, RemoteTransfer(channel, memory)], name)
        channel.start(self.lost.set)
        self.transfer.start(lambda: None)
        self.events: list[TransferEvent] = []

    def end(self) -> None:
        self.transfer.close()
        self.rank.kill()
        self.rank.join()


class Whole:
    """A node of one rank, into which others write."""

    def __init__(self) -> None:
        self.part, self.expected = filled(2, 0, 9), filled(2, 0, 1)
        self.transfer = ShardedTransfer([registered(self.part, "target-rank0", 0)], "target")
        self.transfer.start(lambda: None)
        self.events: list[TransferEvent] = []
        self.right: dict[int, bool] = {}
        """Room -> whether its pages were right when its landing was told."""

    def end(self) -> None:
        self.transfer.close()


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Whole]]:
    source, target = Node("source", 1), Whole()
    yield source, target
    source.end()
    target.end()


def pages_of(room: int) -> tuple[int, ...]:
    return tuple(range(room % 16 * PAGES_A_WRITE, room % 16 * PAGES_A_WRITE + PAGES_A_WRITE))


def pump(source: Node, target: Whole) -> None:
    source.events += source.transfer.poll()
    for event in target.transfer.poll():
        target.events.append(event)
        if isinstance(event, Notified):
            room = int(event.payload)
            first, *_, last = pages_of(room)
            pages = slice(first, last + 1)
            right = np.array_equal(target.part[pages], target.expected[pages])
            target.right[room] = right
    time.sleep(0.0005)


def until(reached: Callable[[], bool], source: Node, target: Whole) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not reached():
        assert time.monotonic() < deadline, f"saw {source.events[-9:]}, {target.events[-9:]}"
        pump(source, target)


def post(source: Node, rooms: range) -> None:
    source.transfer.submit(
        [Write(room, 0, "target", pages_of(room), pages_of(room), b"%d" % room) for room in rooms]
    )


def connect(source: Node, target: Whole) -> None:
    renew = RenewLease("target", time.monotonic() + 3600)
    source.transfer.submit([AddPeer("target", target.transfer.memories), renew])
    until(lambda: PeerAdded("target") in source.events, source, target)


def test_two_processes_write_one_page(nodes: tuple[Node, Whole]) -> None:
    source, target = nodes
    connect(source, target)
    post(source, range(WRITES))
    until(lambda: len(target.right) == WRITES and len(source.events) > WRITES, source, target)
    assert all(target.right.values())
    done = [event for event in source.events if isinstance(event, WriteDone)]
    assert sorted(event.room for event in done) == list(range(WRITES))
    assert {event.num_bytes for event in done} == {PAGES_A_WRITE * target.part[0].nbytes}


def test_what_a_killed_rank_had_not_written_is_never_told(nodes: tuple[Node, Whole]) -> None:
    source, target = nodes
    connect(source, target)
    post(source, range(2))
    until(lambda: len(target.right) == 2, source, target)
    post(source, range(2, MANY))
    until(lambda: any(isinstance(e, PieceLanded) for e in target.events[8:]), source, target)
    assert source.rank.pid is not None
    os.kill(source.rank.pid, 9)
    until(source.lost.is_set, source, target)
    over = time.monotonic() + 1.0
    until(lambda: time.monotonic() > over, source, target)
    assert all(target.right.values())
    told = {event.room for event in source.events if isinstance(event, WriteDone)}
    ended = [event.room for event in source.events if isinstance(event, WriteDone | WriteFailed)]
    assert len(ended) == len(set(ended))
    assert told <= set(target.right)
    assert len(target.right) < MANY, "the kill came after the last write"
    post(source, range(MANY, MANY + 1))
    over = time.monotonic() + 0.2
    until(lambda: time.monotonic() > over, source, target)
    assert MANY not in target.right
