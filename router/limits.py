"""Bounds of the dispatcher."""

from dataclasses import dataclass, field

from router.admission import AdmissionLimits
from router.local_prefill import LocalLimits
from router.replay import ReplayLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """See `RouterConfig`."""

    node_wait_s: float = 30.0
    request_timeout_s: float = 3600.0
    local: LocalLimits = field(default_factory=LocalLimits)
    waits_for_cached: bool = False
    """See `picking.Rules`."""
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    replay: ReplayLimits = field(default_factory=ReplayLimits)
