"""Plain records a scheduler leaves behind for logs and metrics."""

from dataclasses import dataclass, field

from common.messages import NodeStats


@dataclass(frozen=True, slots=True)
class StageSample:
    """How long one request (or token) spent in one stage, in seconds."""

    stage: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """One attempt's end on this node."""

    room: int
    rid: str
    attempt: int
    outcome: str
    prompt_tokens: int
    output_tokens: int
    stages: dict[str, float]
    """Stage name -> seconds since the request came to this node."""
    adapter: str = ""
    """Its name; empty for the base model."""


@dataclass(slots=True)
class Report:
    """What one turn of the loop adds to logs and metrics."""

    stats: NodeStats
    samples: list[StageSample] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)
    transferred: list[tuple[int, float]] = field(default_factory=list)
    """(bytes, seconds) of each finished write."""
