"""Settings of the nodes of scheduler tests: small numbers, so that every limit is met."""

from typing import Any

from common.messages import WIRE_VERSION, Fingerprint
from common.settings import SchedulerSettings
from tests.unit.scheduler.model import PAGE, VOCAB

LEASE_S, POST_S = 4.0, 1.0
UNPROVEN_S, STOPPED_S = 30.0, 60.0
PAGE_BYTES = 64
FINGERPRINT = Fingerprint(
    wire_version=WIRE_VERSION,
    model="m",
    dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    page_size=PAGE,
)


def settings(incarnation: str, num_pages: int, **overrides: Any) -> SchedulerSettings:
    values: dict[str, Any] = {
        "incarnation": incarnation,
        "fingerprint": FINGERPRINT,
        "num_pages": num_pages,
        "page_size": PAGE,
        "vocab_size": VOCAB,
        "max_model_len": 200,
        "max_running_requests": 4,
        "chunk_size": 6,
        "twin_timeout_s": 8.0,
        "transfer_timeout_s": 20.0,
        "lease_s": LEASE_S,
        "longest_post_s": POST_S,
        "unproven_s": UNPROVEN_S,
        "stopped_peer_s": STOPPED_S,
        "sync_s": 0.5,
        "drain_s": 3.0,
    }
    return SchedulerSettings(**values | overrides)
