"""The two choices every process knows: which half a node serves, how a pause treats work."""

from enum import StrEnum


class DisaggregationMode(StrEnum):
    """Which half of a request a node serves. Looked at once, in `deploy/node.py`."""

    PREFILL = "prefill"
    DECODE = "decode"


class PauseMode(StrEnum):
    """What `pause_generation` does with unfinished requests."""

    ABORT = "abort"
    """End every unfinished request with reason `abort`."""
    RETRACT = "retract"
    """Requests give their KV up and go back to the router, which replays them later."""
    IN_PLACE = "in_place"
    """Keep everything; only forward passes stop."""

    @property
    def empties_node(self) -> bool:
        """Whether no KV computed before the pause may survive it."""
        return self is not PauseMode.IN_PLACE
