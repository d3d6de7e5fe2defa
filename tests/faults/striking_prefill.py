"""A prefill node that sends itself a signal just before it posts a write.

Run as `python -m tests.faults.striking_prefill` in place of `prefill_node`. It strikes when the
file that `STRIKE_FILE` names appears: between the look at the lease and the post, where no clock
protects decode's pages. One process strikes for each file: whoever takes it away.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.planted import run_prefill

STRIKE_FILE = "PDSERVE_TEST_STRIKE_FILE"


def order(path: Path, number: signal.Signals) -> None:
    """Let the next write of some prefill node that watches `path` be struck."""
    fresh = path.with_suffix(".new")
    fresh.write_text(str(int(number)))
    fresh.replace(path)


def struck(path: Path) -> int | None:
    """The process that has obeyed, or None so far."""
    answer = path.with_suffix(".struck")
    return int(answer.read_text()) if answer.exists() else None


def _obey(path: Path) -> None:
    mine = path.with_suffix(f".{os.getpid()}")
    try:
        path.rename(mine)
    except FileNotFoundError:
        return
    number = signal.Signals(int(mine.read_text()))
    mine.write_text(str(os.getpid()))
    mine.replace(path.with_suffix(".struck"))
    os.kill(os.getpid(), number)


def plant(path: Path) -> None:
    """From now on look for the order before each post."""
    from transfer.nixl import NixlAgent

    post: Callable[..., Any] = NixlAgent.post

    def planted(*args: Any) -> Any:
        _obey(path)
        return post(*args)

    setattr(NixlAgent, "post", planted)  # noqa: B010 - a method is replaced on purpose


if __name__ == "__main__":
    sys.exit(run_prefill(lambda: plant(Path(os.environ[STRIKE_FILE]))))
