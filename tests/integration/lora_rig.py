"""Adapters on a cluster of real processes: what they answer, the verbs, and who still uses them."""

import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.adapters import make_adapters
from tests.faults.load import Work, make_work
from tests.integration.client import Client, client, eventually
from tests.integration.oracle import Oracle
from tests.processes import Flags, Fleet, fleet

NAMES = ("qv-4", "mlp-16-rslora", "uneven-12")
"""Of `ADAPTERS`: of different ranks and targets, one with rslora and one with patterns."""
GUEST = "guest"
"""The name of an adapter that comes and goes."""
PROMPT_S = 5.0
"""A verb that takes longer has waited for something it must not wait for."""


class Wardrobe:
    """A model and adapters for it, by the names under which a cluster is to know them."""

    def __init__(self, model: Path, adapters: dict[str, Path]) -> None:
        self.model = model
        self.adapters = adapters
        self._oracle = Oracle(model, adapters)

    def answer(self, prompt: list[int], count: int, adapter: str | None = None) -> list[int]:
        """What PEFT answers; the base model if no adapter is named."""
        return self._oracle.answer(prompt, count, adapter)

    def works(
        self,
        chance: random.Random,
        each: int,
        prompt_tokens: tuple[int, int],
        output_tokens: tuple[int, int],
        names: Iterable[str | None] | None = None,
        trunk: Sequence[int] = (),
    ) -> list[Work]:
        """`each` for every name (all adapters and the base model if not given), taking turns; see
        `make_work`."""
        wanted = [None, *self.adapters] if names is None else list(names)
        made = [
            make_work(self._oracle, chance, each, prompt_tokens, output_tokens, name, trunk)
            for name in wanted
        ]
        return [work for turn in zip(*made, strict=True) for work in turn]


def make_wardrobe(model: Path, folder: Path, *, with_guest: bool = False) -> Wardrobe:
    """Three adapters, made in `folder`; the last of them is the guest if there is to be one."""
    adapters = make_adapters(model, folder, NAMES)
    if with_guest:
        _, path = adapters.popitem()
        adapters[GUEST] = path
    return Wardrobe(model, adapters)


# ---------------------------------------------------------------- verbs


@contextmanager
def crowded_fleet(wardrobe: Wardrobe, node_flags: Flags, router_flags: Flags) -> Iterator[Fleet]:
    """2P2D whose decode nodes keep no pages in reserve, so that they retract, and learn soon that a
    node is dead."""
    impatient = {"lease_s": 2, "longest_post_s": 0.5, "peer_timeout_s": 2}
    with fleet(
        wardrobe.model,
        prefill=2,
        decode=2,
        node_flags={**impatient, **node_flags},
        decode_flags={"reserve_pages": 0},
        router_flags=router_flags,
    ) as made:
        yield made


async def try_load(
    session: Client, name: str, path: object, **more: Any
) -> tuple[int, dict[str, Any]]:
    """Status and body, whatever they are."""
    body = {"lora_name": name, "lora_path": str(path), **more}
    return await session.post("/load_lora_adapter", body)


async def load(session: Client, name: str, path: object, **more: Any) -> dict[str, Any]:
    """Load and see that it was loaded; the body."""
    status, answer = await try_load(session, name, path, **more)
    assert status == 200, answer
    assert answer["success"] is True
    return answer


async def load_all(session: Client, wardrobe: Wardrobe) -> None:
    """Those that the cluster does not have yet."""
    known = await listed(session)
    for name, path in wardrobe.adapters.items():
        if name not in known:
            await load(session, name, path)


async def try_unload(session: Client, name: str) -> tuple[int, dict[str, Any]]:
    return await session.post("/unload_lora_adapter", {"lora_name": name})


async def unload(session: Client, name: str) -> None:
    status, answer = await try_unload(session, name)
    assert status == 200, answer
    assert answer["success"] is True


async def listed(session: Client) -> set[str]:
    """Adapters that clients are told of."""
    status, answer = await session.get("/v1/models")
    assert status == 200, answer
    return {model["id"] for model in answer["data"] if model.get("parent") is not None}


async def unload_promptly(session: Client, name: str) -> None:
    began = time.monotonic()
    await unload(session, name)
    took = time.monotonic() - began
    assert took < PROMPT_S, f"unloading {name} took {took:.1f} s"


# ---------------------------------------------------------------- nodes


async def held_by(session: Client) -> dict[str, set[str]]:
    """Adapters that each node can serve, as it says itself."""
    infos = [await session.node_info(node) for node in await session.nodes()]
    return {info["name"]: {one["name"] for one in info["adapters"]} for info in infos}


async def in_use(session: Client) -> dict[str, int]:
    """Adapter -> unfinished requests, summed over all nodes that answer."""
    counts: dict[str, int] = defaultdict(int)
    for node in await session.nodes():
        stats = (await session.node_info(node))["stats"]
        for name, count in stats.get("running_loras", {}).items():
            counts[name] += count
    return dict(counts)


async def nobody_uses_any(session: Client, timeout_s: float = PROMPT_S) -> None:
    """Until no node has an unfinished request of any adapter."""

    async def unused() -> bool:
        return await in_use(session) == {}

    async def explain() -> object:
        return await in_use(session)

    await eventually(unused, timeout_s, explain)


async def mend(running: Fleet) -> None:
    """Whatever a test before left behind: everybody runs, nothing is paused, nobody asks."""
    for member in running.members.values():
        member.signal(signal.SIGCONT)
        if not member.is_alive:
            member.start()
    await running.ready()
    async with client(running.url) as session:
        await abort_all(session)
        await go_on(session)


# ---------------------------------------------------------------- requests


async def pause(session: Client) -> None:
    status, answer = await session.post("/pause_generation", {"mode": "in_place"})
    assert status == 200, answer


async def go_on(session: Client) -> None:
    status, answer = await session.post("/continue_generation")
    assert status == 200, answer


async def abort_all(session: Client) -> None:
    status, answer = await session.post("/abort_request", {"abort_all": True})
    assert status == 200, answer
