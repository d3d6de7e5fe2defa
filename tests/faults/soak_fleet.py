"""What a soak runs on: two prefill and two decode nodes with small pools, and a list of answers of
the base model and adapters, more of these than there are slots or is memory for."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from tests.faults.load import Work
from tests.faults.matrix import PATIENT
from tests.faults.soak import Soak, SoakReport, SoakSettings
from tests.integration.client import client
from tests.integration.lora_rig import GUEST, Wardrobe, load, make_wardrobe
from tests.integration.oracle import random_prompt
from tests.processes import BOTH_PATHS, Fleet, fleet
from tests.tiny_models import make_tiny_model

WORKS_EACH = 12
"""For each adapter and the base model."""
TRUNK_TOKENS = 90
"""Prompts begin with as much of it as they like: of these pages caches live, beside whole prompts
that are asked again."""
NODE_FLAGS = {
    "num_pages": 60, "chunk_size": 64, "lease_s": 3, "longest_post_s": 1, "peer_timeout_s": 3,
    "max_loras_per_batch": 2, "max_loaded_loras": 2,
}  # fmt: skip
"""Pools for some five requests, so that retraction and waiting for pages are part of the day."""


def run_soak(
    folder: Path, settings: SoakSettings, say: Callable[[str], None] | None = None
) -> SoakReport:
    """Make the model, its answers and the fleet in `folder`, soak, end everything."""
    model = make_tiny_model("llama", folder / "model")
    wardrobe = make_wardrobe(model, folder / "adapters", with_guest=True)
    chance = random.Random(settings.seed)
    trunk = random_prompt(chance, TRUNK_TOKENS)
    works = wardrobe.works(chance, WORKS_EACH, (1, 200), (10, 120), trunk=trunk)
    with fleet(
        model, prefill=2, decode=2, node_flags=NODE_FLAGS, router_flags={**PATIENT, **BOTH_PATHS}
    ) as running:
        if say is not None:
            say(f"{len(works)} answers known, {len(running.members)} processes ready")
        return asyncio.run(_soak(running, wardrobe, works, settings))


async def _soak(
    running: Fleet, wardrobe: Wardrobe, works: list[Work], settings: SoakSettings
) -> SoakReport:
    async with client(running.url) as session:
        for name, path in wardrobe.adapters.items():
            if name != GUEST:
                await load(session, name, path)
    return await Soak(running, works, wardrobe.adapters[GUEST], settings).run()
