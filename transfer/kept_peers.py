"""A library's side of peers, kept over the loss of a link.

A peer that fell silent and comes back is the same process with the same memory. Dropping it from
NIXL and loading it anew leaves its old connections open on both sides, for neither side's library
closes what the other might still use: measured, one socket a link and cycle through shared memory
and two through TCP, for as long as both processes live. So an unbroken peer that leaves is kept,
and found again. One that broke is dropped: its descriptor lists never recover, and its sockets are
closed with the break.
"""

import logging
from collections import OrderedDict
from typing import Protocol

from common.messages import PeerMemory

log = logging.getLogger(__name__)

KEPT_PEERS = 16
"""Peers that left and may come back; what is kept of the dead is bounded by this."""


class Library(Protocol):
    """The two primitives of a `WriteAgent` that concern a peer as a whole."""

    def add_peer(self, memory: PeerMemory) -> None: ...

    def remove_peer(self, memory: PeerMemory) -> None: ...


class KeptPeers:
    """Adds peers to a library and drops them, the unbroken ones late; not thread-safe."""

    def __init__(self, library: Library, limit: int = KEPT_PEERS) -> None:
        self._library = library
        self._limit = limit
        self._kept: OrderedDict[str, PeerMemory] = OrderedDict()
        """By agent name, those that left longest ago first."""

    def add(self, memory: PeerMemory) -> None:
        """Make a pool writable. Raises what the library does, and then leaves nothing behind."""
        kept = self._kept.pop(memory.agent_name, None)
        if kept == memory:
            return
        if kept is not None:
            self._drop(kept)
        self._library.add_peer(memory)

    def leave(self, memory: PeerMemory, *, broken: bool) -> None:
        """Nothing is posted to this peer any more."""
        if broken:
            self._drop(memory)
            return
        self._kept[memory.agent_name] = memory
        while len(self._kept) > self._limit:
            self._drop(self._kept.popitem(last=False)[1])

    def _drop(self, memory: PeerMemory) -> None:
        try:
            self._library.remove_peer(memory)
        except Exception as error:  # a leak in the library and nothing more
            name, kind = memory.agent_name, type(error).__name__
            log.warning("could not drop agent %s: %s: %s", name, kind, error)
