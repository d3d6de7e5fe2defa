"""A prefill node is struck between its look at the lease and its post; decode's pages are wanted.

Stopped, it wakes up long after every clock has run out, and does write: into pages that nobody else
was given meanwhile. Killed, it writes no more, and its pages come home at once.
"""

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.load import Load, Work, make_work
from tests.faults.matrix import PATIENT
from tests.faults.striking_prefill import STRIKE_FILE, order, struck
from tests.integration.client import Client, client, eventually
from tests.integration.oracle import Oracle
from tests.processes import Fleet, fleet, showing_logs
from tests.tiny_models import make_tiny_model

log = logging.getLogger(__name__)

LEASE_S, POST_S = 1.5, 0.5
NODE_FLAGS = {
    "num_pages": 100, "chunk_size": 64, "heartbeat_s": 0.2, "peer_timeout_s": 1.0,
    "lease_s": LEASE_S, "longest_post_s": POST_S, "unproven_s": 20.0,
}  # fmt: skip
ROUTER_FLAGS = {**PATIENT, "node_timeout_s": 1.5}
TRANSPORTS = pytest.mark.parametrize("ucx_tls", [None, "tcp"], ids=["default", "tcp"])

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def works(folder: Path) -> list[Work]:
    """Together they want twice the pages that a decode node has."""
    return make_work(Oracle(folder), random.Random(5), 10, (200, 300), (20, 40))


@pytest.fixture
def strike_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "strike"
    monkeypatch.setenv(STRIKE_FILE, str(path))
    return path


@pytest.fixture
def running(folder: Path, strike_file: Path, ucx_tls: str | None) -> Iterator[Fleet]:
    """2P1D: all that the struck node leaves undone goes over the other to the same pages."""
    flags = NODE_FLAGS | ({} if ucx_tls is None else {"ucx_tls": ucx_tls})
    with fleet(
        folder,
        prefill=2,
        decode=1,
        node_flags=flags,
        router_flags=ROUTER_FLAGS,
        prefill_module="tests.faults.striking_prefill",
    ) as made:
        yield made


async def counted(session: Client, name: str) -> int:
    (decode,) = [node for node in await session.nodes() if node["role"] == "decode"]
    info = await session.node_info(decode)
    found: dict[str, Any] = info["stats"]
    return int(found.get(name, 0) or found.get("counters", {}).get(name, 0))


@asynccontextmanager
async def struck_under_load(
    fleet: Fleet, works: list[Work], path: Path, number: signal.Signals
) -> AsyncIterator[tuple[Client, int]]:
    """All streams end right although a prefill node was struck; yields meanwhile."""
    async with (
        showing_logs(fleet),
        client(fleet.url) as session,
        Load([fleet.url], works) as load,
    ):
        order(path, number)

        async def obeyed() -> bool:
            return struck(path) is not None

        await eventually(obeyed, 30)
        pid = struck(path)
        assert pid is not None
        yield session, pid
        await all_right(load)
        await session.wait_idle(60)


async def all_right(load: Load) -> None:
    await load.finish()
    for stream in load.streams:
        assert stream.is_right, stream.describe()


def at_least(session: Client, name: str, least: int) -> Callable[[], Any]:
    async def check() -> bool:
        return await counted(session, name) >= least

    return check


@TRANSPORTS
def test_a_prefill_that_wakes_up_writes_into_nobody_elses_pages(
    running: Fleet, works: list[Work], strike_file: Path
) -> None:
    async def run() -> None:
        async with struck_under_load(running, works, strike_file, signal.SIGSTOP) as (session, pid):
            await eventually(at_least(session, "quarantined_pages", 1), 30)
            async with Load([running.url], works) as meanwhile:
                # As long as a clock alone would have waited, twice over: the others take pages.
                await asyncio.sleep(2 * (LEASE_S + POST_S + 1.0))
                await all_right(meanwhile)
            assert await counted(session, "quarantined_pages") > 0
            async with Load([running.url], works) as later:
                woken = time.monotonic()
                os.kill(pid, signal.SIGCONT)
                await eventually(at_least(session, "quarantine_drained", 1), 30)
                log.info("pages home %.2f s after SIGCONT", time.monotonic() - woken)
                await all_right(later)
            await eventually(at_least(session, "late_writes", 1), 30)
            assert await counted(session, "stray_writes") == 0
            await running.ready()

    asyncio.run(run())


@TRANSPORTS
def test_a_killed_prefills_pages_are_home_in_seconds_and_its_successor_is_usable(
    running: Fleet, works: list[Work], strike_file: Path
) -> None:
    async def run() -> None:
        async with struck_under_load(running, works, strike_file, signal.SIGKILL) as (session, pid):
            died = time.monotonic()
            await eventually(at_least(session, "quarantine_gone", 1), 30)
            log.info("pages home %.2f s after kill -9", time.monotonic() - died)
            (victim,) = [node for node in running.nodes if node.pid == pid]
            await victim.ended()
            victim.start()
            await running.ready()
            assert await counted(session, "stray_writes") == 0
            async with Load([running.url], works) as after:
                await all_right(after)

    asyncio.run(run())
