"""{prefill, decode, router} x {kill -9, SIGSTOP, SIGTERM, restart} x four phases, cell by cell."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.faults.matrix import CELLS, Arena, Cell
from tests.processes import showing_logs

pytestmark = pytest.mark.timeout(300)
"""Starting a fleet takes a busy machine a minute, and counts for the first test."""


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    made = Arena.prepare(tmp_path_factory.mktemp("matrix"))
    try:
        made.fleet.start()
        asyncio.run(made.warm_up())
        yield made
    finally:
        made.fleet.close()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_nothing_is_lost(cell: Cell, arena: Arena) -> None:
    async def run() -> None:
        await arena.mend()
        async with showing_logs(arena.fleet):
            await arena.run(cell)

    asyncio.run(run())
