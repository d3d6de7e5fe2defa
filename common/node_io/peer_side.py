"""What the two ends of the side channel have in common, as the I/O thread sees them."""

from dataclasses import dataclass
from typing import Protocol

import zmq.asyncio

from common.gatekeeper import Gatekeeper
from common.messages import Incarnation, ToDecode, ToPrefill
from common.node_io.inbox import Inbox
from common.node_io.settings import IOSettings, Registration
from common.tally import Tally


@dataclass(frozen=True, slots=True)
class Wiring:
    """What every room of the I/O thread works with."""

    node: Incarnation
    settings: IOSettings
    context: zmq.asyncio.Context
    gate: Gatekeeper
    inbox: Inbox
    tally: Tally


class PeerSide(Protocol):
    """`PeerServer` on a prefill node, `PeerDialler` on a decode node. Called in the loop only."""

    def open(self, wiring: Wiring) -> int | None:
        """Bind if this side listens; returns the port. Raises CannotBind."""

    def register(self, registration: Registration) -> None:
        """Model, cache and transfer are registered."""

    def send(self, peer: Incarnation, link: int, body: ToPrefill | ToDecode) -> None:
        """Over an open link; dropped and counted otherwise. Never waits."""

    def dial(self, peer: Incarnation, address: str, link: int) -> None:
        """Open a link, if this side dials."""

    def hang_up(self, peer: Incarnation, link: int) -> None:
        """Close a link; one that is not open is ignored."""

    def probe(self, peer: Incarnation, address: str) -> None:
        """Find out whether a peer's process exists, if this side dials."""

    def tick(self, paused: bool) -> None:
        """Once every heartbeat. `paused`: this node makes no forward passes now."""

    def linked(self) -> list[Incarnation]:
        """Peers with an established link."""

    def close(self, goodbye: bool) -> None:
        """Close all sockets, saying goodbye first if asked."""
