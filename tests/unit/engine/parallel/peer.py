"""A rank for `test_group`: joins a group and makes the calls that its command line names.

python -m tests.unit.engine.parallel.peer PORT RANK SIZE TIMEOUT_S CALL...
"""

import os
import signal
import sys
import time

import torch

from common.engine.parallel.group import RankGroup

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_calls(group: RankGroup) -> None:
    """The same on every rank; raises AssertionError where the answer is not all ranks'."""
    size = group.size
    for dtype in DTYPES:
        x = torch.arange(12, dtype=dtype).view(3, 4) + group.rank
        group.sum_(x)
        total = size * torch.arange(12).view(3, 4) + sum(range(size))
        assert torch.equal(x, total.to(dtype))
        columns = 4 * size - 2  # the last rank has two only
        own = 2 if group.rank == size - 1 else 4
        first = 4 * group.rank
        mine = torch.arange(2)[:, None] * 100 + torch.arange(first, first + own)
        joined = group.join_columns(mine.to(dtype), columns)
        assert torch.equal(
            joined, (torch.arange(2)[:, None] * 100 + torch.arange(columns)).to(dtype)
        )
    tokens = torch.full((5,), group.rank + 7)
    group.share_(tokens)
    assert tokens.tolist() == [7] * 5
    assert group.least(40 - group.rank) == 41 - size


def main(port: int, rank: int, size: int, timeout_s: float, calls: list[str]) -> None:
    torch.set_num_threads(1)
    group = RankGroup(rank, size)
    group.connect(torch.device("cpu"), port, timeout_s)
    for call in calls:
        match call:
            case "calls":
                make_calls(group)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stay away":
                time.sleep(60)
    group.close()


if __name__ == "__main__":
    given = sys.argv[1:]
    main(int(given[0]), int(given[1]), int(given[2]), float(given[3]), given[4:])
