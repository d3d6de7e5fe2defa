"""A rank of a node beside the first: `python -m deploy.rank FD`, started by `deploy.ranks` only.

It loads its part of the model, registers its part of the pool, and then does what rank 0 says:
batches on the main thread, in order; transfers and adapters on threads of theirs. It draws nothing,
knows no request, and ends when rank 0 says so or is gone.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn

from common.rank_channel import RankChannel, Topic
from deploy.process import die_with_supervisor
from deploy.rank_messages import Setup, ToRank, decode_to_rank

Orders = SimpleQueue[ToRank | bytes]
"""What rank 0 says, in order; bytes are a batch."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Follow rank 0 until the end; ends the process."""
    die_with_supervisor()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    (number_of_pipe,) = sys.argv[1:] if argv is None else argv
    connection: Connection[Any, Any] = Connection(int(number_of_pipe))
    channel = RankChannel(connection)
    orders: Orders = SimpleQueue()
    channel.listen(Topic.CONTROL, lambda payload: orders.put(decode_to_rank(payload)))
    channel.listen(Topic.BATCH, orders.put)
    channel.start(_end_at_once)
    setup = orders.get()
    assert isinstance(setup, Setup), f"rank 0 began with {setup!r}"
    # Only now: torch takes seconds to import, and rank 0 may be gone by then.
    from deploy.following import follow

    code = follow(setup, channel, orders.get)
    # Everything is closed. Taking an interpreter with torch in it apart takes a busy machine
    # seconds, in which rank 0 would wait.
    logging.shutdown()
    os._exit(code)


def _end_at_once() -> None:
    os._exit(1)


if __name__ == "__main__":
    main()
