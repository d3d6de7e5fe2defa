"""What a soak runs on: two prefill and two decode nodes with small pools, and a list of answers."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from tests.faults.load import make_work
from tests.faults.matrix import PATIENT
from tests.faults.soak import Soak, SoakReport, SoakSettings
from tests.integration.oracle import Oracle
from tests.processes import fleet
from tests.tiny_models import make_tiny_model

NUM_WORKS = 40
NODE_FLAGS = {
    "num_pages": 60, "chunk_size": 64, "lease_s": 3, "longest_post_s": 1, "peer_timeout_s": 3,
}  # fmt: skip
"""Pools for some five requests, so that retraction and waiting for pages are part of the day."""


def run_soak(
    folder: Path, settings: SoakSettings, say: Callable[[str], None] | None = None
) -> SoakReport:
    """Make the model, its answers and the fleet in `folder`, soak, end everything."""
    model = make_tiny_model("llama", folder / "model")
    chance = random.Random(settings.seed)
    works = make_work(Oracle(model), chance, NUM_WORKS, (1, 200), (10, 120))
    with fleet(model, prefill=2, decode=2, node_flags=NODE_FLAGS, router_flags=PATIENT) as running:
        if say is not None:
            say(f"{len(works)} answers known, {len(running.members)} processes ready")
        return asyncio.run(Soak(running, works, settings).run())
