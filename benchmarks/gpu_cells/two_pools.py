"""Two processes with a page pool each on one device, and NIXL between them.

The receiver obeys two words over a pipe: a tuple of page ids (it answers with their bytes' digest)
and None (it ends). By itself it says, for each batch of notifications, when it had them.
"""

import hashlib
import multiprocessing
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from common.engine.device import activate
from common.kv_cache.storage import PagedKVCache
from common.messages import PeerMemory
from common.plan import (
    AddPeer,
    ExpectWrites,
    Notified,
    PeerAdded,
    RenewLease,
    TransferEvent,
    Write,
    WriteDone,
)
from transfer.nixl import NixlTransfer
from transfer.sharded import ShardedTransfer

SOURCE, TARGET = "gpu-source", "gpu-target"
STAMP = b"stamp"
ANSWER_S = 60.0
"""How long a first connection, or any write, may take; connecting is slow."""
LOOK_S = 0.00005
LEASE_S = 3600.0


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What both pools are made of."""

    num_pages: int
    num_layers: int
    num_kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype
    device: str

    def make(self) -> PagedKVCache:
        """A pool of zeros."""
        return PagedKVCache(
            num_pages=self.num_pages,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            page_size=self.page_size,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
        )


def register(cache: PagedKVCache, incarnation: str) -> ShardedTransfer:
    """What a node of one rank has, over a pool in host memory or on a GPU."""
    on_gpu = cache.device.type == "cuda"
    local = NixlTransfer(
        cache.base_address,
        cache.num_pages,
        cache.page_bytes,
        incarnation,
        {},
        num_layers=cache.num_layers,
        first_head=0,
        num_heads=cache.num_kv_heads,
        kind="VRAM" if on_gpu else "DRAM",
        device_id=cache.device.index or 0 if on_gpu else 0,
        prepare_thread=partial(activate, cache.device),
    )
    return ShardedTransfer([local], incarnation)


def digest(cache: PagedKVCache, pages: Sequence[int]) -> str:
    """Of the bytes of `pages`, in that order."""
    picked = cache.tensor[torch.tensor(pages, device=cache.device)].cpu().contiguous()
    return hashlib.blake2b(picked.view(torch.uint8).numpy().data).hexdigest()


def receive(pipe: Connection, shape: PoolShape) -> None:
    """The receiver's life; see the module."""
    activate(torch.device(shape.device))
    cache = shape.make()
    transfer = register(cache, TARGET)
    bell = os.eventfd(0)
    transfer.start(lambda: os.eventfd_write(bell, 1))
    transfer.submit([ExpectWrites(True)])
    pipe.send(transfer.memories)
    while True:
        ready, _, _ = select.select([pipe.fileno(), bell], [], [])
        if bell in ready:
            os.eventfd_read(bell)
            now = time.monotonic()
            if any(isinstance(event, Notified) for event in transfer.poll()):
                pipe.send(now)
        if pipe.fileno() in ready:
            pages = pipe.recv()
            if pages is None:
                break
            pipe.send(digest(cache, pages))
    transfer.close()


class TwoPools:
    """A pool of random numbers here, one of zeros in a process of its own, and writes from the
    first to the second. A context manager.

    Raises what NIXL does when it cannot be set up, and TimeoutError.
    """

    def __init__(self, shape: PoolShape) -> None:
        self.cache = shape.make()
        self.cache.tensor.normal_()
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)
        self._source = register(self.cache, SOURCE)
        self._source.start(lambda: None)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=receive, args=(theirs, shape), daemon=True)
        self._process.start()
        theirs.close()
        self._next_chunk = 0

    def __enter__(self) -> "TwoPools":
        try:
            memories: tuple[PeerMemory, ...] = self._answer()
            until = time.monotonic() + LEASE_S
            self._source.submit([AddPeer(TARGET, memories), RenewLease(TARGET, until)])
            added = self._event()
            if not isinstance(added, PeerAdded):
                raise RuntimeError(f"the pools cannot be connected: {added}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, source: Sequence[int], target: Sequence[int]) -> float:
        """Copy pages; seconds until the receiver's engine knows that they are there."""
        self._next_chunk += 1
        write = Write(1, self._next_chunk, TARGET, tuple(source), tuple(target), STAMP)
        began = time.monotonic()
        self._source.submit([write])
        ended = self._event()
        if not isinstance(ended, WriteDone):
            raise RuntimeError(f"the write failed: {ended}")
        return float(self._answer()) - began

    def landed(self, pages: Sequence[int]) -> str:
        """The digest of pages at the receiver."""
        self._pipe.send(tuple(pages))
        return str(self._answer())

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._source.close()

    def _event(self) -> TransferEvent:
        """The source's next; it had none before."""
        return _within(ANSWER_S, self._poll_one, "the transfer said nothing")

    def _poll_one(self) -> TransferEvent | None:
        events = self._source.poll()
        return events[0] if events else None

    def _answer(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError("the receiver said nothing")
        return self._pipe.recv()


def _within(
    seconds: float, ask: Callable[[], TransferEvent | None], otherwise: str
) -> TransferEvent:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        answer = ask()
        if answer is not None:
            return answer
        time.sleep(LOOK_S)
    raise TimeoutError(otherwise)
