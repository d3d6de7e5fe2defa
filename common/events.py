"""What reaches a node's engine thread from its I/O thread, and what goes back beside the plan.

The I/O thread owns every socket. It has already decoded, checked incarnations and sequence numbers
and judged liveness; the engine thread sees only facts.
"""

from dataclasses import dataclass

from common.messages import (
    Abort,
    AdminVerb,
    Generate,
    Incarnation,
    PeerGone,
    Peers,
    ToDecode,
    ToPrefill,
)


@dataclass(frozen=True, slots=True)
class FromRouter:
    router: Incarnation
    body: Generate | Abort | PeerGone | Peers


@dataclass(frozen=True, slots=True)
class RouterLost:
    """A router is gone, is back under a new incarnation, lost messages, or asked for a reset."""

    router: Incarnation


@dataclass(frozen=True, slots=True)
class FromPeer:
    peer: Incarnation
    body: ToPrefill | ToDecode


@dataclass(frozen=True, slots=True)
class PeerSilent:
    """Nothing was heard from a peer for its time-out, or it could not be reached at all."""

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """An administrative verb, from a router or from this node's HTTP; answered by `AdminDone`."""

    ticket: int
    verb: AdminVerb


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The process was asked to end: by draining, or `at_once`."""

    at_once: bool = False


Event = FromRouter | RouterLost | FromPeer | PeerSilent | AdminRequest | Shutdown


@dataclass(frozen=True, slots=True)
class AdminDone:
    ticket: int
    ok: bool
    message: str = ""
