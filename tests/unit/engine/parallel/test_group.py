"""Ranks that are processes, over gloo: what they get together, and how a loss is noticed."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from common.engine.parallel.group import ALONE, LOOPBACK, RankGroup, meeting_point
from tests.unit.engine.parallel.peer import make_calls

ROOT = Path(__file__).parents[4]
START_S = 60.0


@contextmanager
def joined(size: int, *calls: str) -> Iterator[RankGroup]:
    """Rank 0 of a group whose other ranks make these calls."""
    listening, port = meeting_point()
    peer = [sys.executable, "-m", "tests.unit.engine.parallel.peer"]
    peers = [
        subprocess.Popen([*peer, str(port), str(rank), str(size), str(START_S), *calls], cwd=ROOT)
        for rank in range(1, size)
    ]
    group = RankGroup(0, size)
    try:
        group.connect(torch.device("cpu"), port, START_S, listening)
        yield group
    finally:
        for process in peers:
            if "die" in calls or "stay away" in calls:
                process.kill()
            code = process.wait(START_S)
            assert code in (0, -9)
            assert code == 0 or "calls" not in calls
        group.close()


def test_three_ranks_sum_join_and_share() -> None:
    with joined(3, "calls") as group:
        make_calls(group)
        listeners = [c for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
        assert listeners
        assert {connection.laddr.ip for connection in listeners} == {LOOPBACK}


@pytest.mark.parametrize("call", ["sum_", "join_columns"])
def test_the_death_of_a_rank_is_an_error_at_once(call: str) -> None:
    asks: dict[str, Callable[[RankGroup], object]] = {
        "sum_": lambda group: group.sum_(torch.ones(4)),
        "join_columns": lambda group: group.join_columns(torch.ones(1, 4), 8),
    }
    with joined(2, "die") as group:
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            asks[call](group)
        assert time.monotonic() - began < 10.0


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_said() -> None:
    with joined(2, "stay away") as group:
        # It connects with a time-out that is long enough for a process to start on a busy machine.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            group.sum_(torch.ones(4))
        assert time.monotonic() - began < 10.0


def test_alone_everything_is_ones_own() -> None:
    x = torch.rand(2, 5)
    kept = x.clone()
    ALONE.sum_(x)
    ALONE.share_(x)
    assert torch.equal(x, kept)
    assert ALONE.join_columns(x, 5) is x
    assert ALONE.least(3) == 3
