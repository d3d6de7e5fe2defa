"""The receiving process of the transfer benchmarks: it takes writes and stamps arrivals."""

import multiprocessing
import os
import select
import time
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from common.messages import PeerMemory
from common.plan import AddPeer, ExpectWrites, Notified, PeerAdded, RenewLease
from transfer.base import TransferBackend
from transfer.nixl import NixlTransfer
from transfer.sharded import ShardedTransfer

PAGE_BYTES = 30 * 2 * 3 * 16 * 64 * 2
"""SmolLM2-135M in bfloat16: layers, keys and values, heads, page size, head dimension, bytes."""
NUM_PAGES = 512
TARGET = "bench-target"

Pool = npt.NDArray[np.uint8]


def filled_pool(num_pages: int = NUM_PAGES) -> Pool:
    """[num_pages, PAGE_BYTES], written once so that no page fault is measured."""
    return np.full((num_pages, PAGE_BYTES), 1, dtype=np.uint8)


def backend(pool: Pool, incarnation: str) -> ShardedTransfer:
    """What a node of one rank has."""
    local = NixlTransfer(
        pool.ctypes.data,
        len(pool),
        PAGE_BYTES,
        incarnation,
        {},
        num_layers=30,
        first_head=0,
        num_heads=3,
    )
    return ShardedTransfer([local], incarnation)


def receive(pipe: Connection) -> None:
    """Until the pipe closes: send the time of each batch of notifications (CLOCK_MONOTONIC)."""
    pool = filled_pool()
    transfer = backend(pool, TARGET)
    bell = os.eventfd(0)
    transfer.start(lambda: os.eventfd_write(bell, 1))
    transfer.submit([ExpectWrites(True)])
    pipe.send(transfer.memories)
    while True:
        ready, _, _ = select.select([pipe.fileno(), bell], [], [])
        if pipe.fileno() in ready:
            break
        os.eventfd_read(bell)
        now = time.monotonic()
        landed = [e.payload for e in transfer.poll() if isinstance(e, Notified)]
        if b"stamp" in landed:
            pipe.send(now)
    transfer.close()


class Target:
    """A running receiver, linked to `source` for an hour."""

    def __init__(self, source: TransferBackend) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=receive, args=(theirs,), daemon=True)
        self.process.start()
        memories: tuple[PeerMemory, ...] = self.pipe.recv()
        source.submit([AddPeer(TARGET, memories), RenewLease(TARGET, time.monotonic() + 3600)])
        while PeerAdded(TARGET) not in source.poll():
            time.sleep(0.01)

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(10)
