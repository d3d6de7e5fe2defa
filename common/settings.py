"""What a scheduler needs to know of its node."""

from dataclasses import dataclass

from common.messages import Fingerprint, Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What a scheduler needs to know of its node; see `NodeConfig` for the meanings."""

    incarnation: Incarnation
    fingerprint: Fingerprint
    num_pages: int
    page_size: int
    vocab_size: int
    max_model_len: int
    max_running_requests: int
    chunk_size: int
    prefix_cache: bool = True
    twin_timeout_s: float = 30.0
    transfer_timeout_s: float = 300.0
    lease_s: float = 10.0
    longest_post_s: float = 3.0
    unproven_s: float = 60.0
    stopped_peer_s: float = 600.0
    sync_s: float = 2.0
    drain_s: float = 30.0
    max_queued_requests: int = 4096
    weight_version: str = ""
    max_loras_per_batch: int = 8
    max_loaded_loras: int = 64
    lora_drain_wait_s: float = 2.0

    @property
    def tombstone_s(self) -> float:
        """Longer than any peer can still ask about a room."""
        return 2 * (self.transfer_timeout_s + self.twin_timeout_s + self.lease_s)
