"""Each message type, on each link: lost once, sent twice, late by more than the time-outs.

The types come from the unions themselves, and one that is never seen fails its test, so that a new
message cannot be forgotten. NIXL notifications do not pass a socket of ours: what happens to them
is in the virtual world of `tests/unit/scheduler`.
"""

import asyncio
from collections.abc import Iterator

import pytest

from tests.integration.wire_rig import CELLS, TRIGGERS, Cell, WireRig, wire_rig
from tests.processes import showing_logs
from tests.wire_proxy import Action

Running = tuple[asyncio.Runner, WireRig]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One cluster and one event loop for all cells."""
    with asyncio.Runner() as runner:
        making = wire_rig(tmp_path_factory.mktemp("wire"))
        rig = runner.run(making.__aenter__())
        yield runner, rig
        runner.run(making.__aexit__(None, None, None))


def test_there_is_a_way_to_see_each_message_type() -> None:
    assert set(TRIGGERS) == set(CELLS)


@pytest.mark.parametrize("action", Action)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0]}: {cell[1].__name__}")
def test_one_message_goes_astray(running: Running, cell: Cell, action: Action) -> None:
    runner, rig = running

    async def one() -> None:
        async with showing_logs(rig.fleet):
            await rig.strike(cell, action)

    runner.run(one())
