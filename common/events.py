"""What reaches a node's engine thread from its I/O thread, and what goes back beside the plan.

The I/O thread owns every socket. It has already decoded, checked incarnations and sequence numbers
and judged liveness; the engine thread sees only facts.
"""

from dataclasses import dataclass
from enum import Enum, auto

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

RouterOrder = Generate | Abort | PeerGone | Peers


@dataclass(frozen=True, slots=True)
class FromRouter:
    router: Incarnation
    body: RouterOrder


@dataclass(frozen=True, slots=True)
class RouterLost:
    """A router is gone, is back under a new incarnation, lost messages, or asked for a reset."""

    router: Incarnation


@dataclass(frozen=True, slots=True)
class FromPeer:
    """A message on one link. Links are numbered by the decode node that dials them."""

    peer: Incarnation
    link: int
    body: ToPrefill | ToDecode


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """A link is over: on a decode node exactly one for each `DialPeer`, whoever ended the link.

    When it is posted the I/O thread has closed the link already, so no ping is echoed after it.
    """

    peer: Incarnation
    link: int
    why: str
    silent_s: float | None = 0.0
    """Since the peer's last word on this link; None if it said none."""
    gone: bool = False
    """The peer's process is known to have ended."""


class Reach(Enum):
    """What a plain TCP connection to a peer's side-channel address tells of its process."""

    GONE = auto()
    """Refused: nobody listens, so the process has ended."""
    LISTENING = auto()
    """Taken by the peer's kernel: the process exists, though it may be stopped."""
    UNREACHABLE = auto()
    """No answer in time, or no way there: nothing is known."""


@dataclass(frozen=True, slots=True)
class PeerProbed:
    """The answer to `ProbePeer`."""

    peer: Incarnation
    reach: Reach


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """An administrative verb, from a router or from this node's HTTP; answered by `AdminDone`."""

    ticket: int
    verb: AdminVerb


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The process was asked to end: by draining, or `at_once`."""

    at_once: bool = False


Fact = FromRouter | RouterLost | FromPeer | PeerClosed | PeerProbed
"""What happened outside. It may come while a step is in flight."""
Event = Fact | AdminRequest | Shutdown


@dataclass(frozen=True, slots=True)
class AdminDone:
    ticket: int
    ok: bool
    message: str = ""
    digest: str = ""
    """Of the adapter that was loaded."""
