"""Whether a process that says nothing still exists, asked of its kernel by a plain TCP connection.

A stopped process (SIGSTOP, a debugger, a machine that swaps) cannot answer, yet its kernel takes
connections to its listening socket; the socket of a process that has ended is closed, and its
kernel refuses them. So a refusal proves an end, as long as nothing between the nodes refuses in a
host's name: a firewall between them has to drop, not to reject.
"""

import asyncio
import contextlib

from common.events import Reach
from common.node_io.addresses import Endpoint, expand

PROBE_TIMEOUT_S = 2.0
"""Long enough for one repetition of a lost SYN."""


async def probe(endpoint: Endpoint, timeout_s: float = PROBE_TIMEOUT_S) -> Reach:
    """Connect, and say what that tells. Sends nothing.

    `GONE` for a name only if all its addresses refuse. Bounded by `timeout_s` for each of them.
    """
    answers = {await _connect(address, timeout_s) for address in await expand(endpoint)}
    if Reach.LISTENING in answers:
        return Reach.LISTENING
    return Reach.GONE if answers == {Reach.GONE} else Reach.UNREACHABLE


async def _connect(endpoint: Endpoint, timeout_s: float) -> Reach:
    try:
        connecting = asyncio.open_connection(endpoint.host, endpoint.port)
        _, writer = await asyncio.wait_for(connecting, timeout_s)
    except ConnectionRefusedError:
        return Reach.GONE
    except (TimeoutError, OSError):
        return Reach.UNREACHABLE
    ends = writer.get_extra_info("sockname"), writer.get_extra_info("peername")
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    # A connection to a free local port may meet itself, if the kernel picks that port for its own
    # end: then nobody listens.
    return Reach.GONE if ends[0] == ends[1] else Reach.LISTENING
