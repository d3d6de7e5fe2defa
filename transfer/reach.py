"""Whether NIXL moves pages between pools of this kind of memory at all: it is tried.

A build of UCX says neither whether it can reach a GPU's memory nor how. So two agents are made over
the same pool, and one writes its page 0 into the other's page 1. What that proves is this machine
and its libraries; a network between two machines may still be unable to.
"""

import time
from collections.abc import Callable

import msgspec

from common.messages import PeerMemory
from common.plan import Write
from transfer.nixl import NixlAgent, seal
from transfer.poster import WriteState, describe

TRY_S = 10.0
"""How long the copy of one page may take; a first post takes up to two seconds."""
POLL_S = 0.001

MakeAgent = Callable[[PeerMemory], NixlAgent]


def reach_problem(memory: PeerMemory, make_agent: MakeAgent) -> str | None:
    """Why page 0 of `memory`'s pool could not be written into its page 1; None if it seems to be.

    Whether the right bytes arrived is for the caller to see. `memory` names no agent yet.
    """
    agents: list[NixlAgent] = []
    try:
        described = []
        for end in ("from", "to"):
            named = msgspec.structs.replace(memory, agent_name=f"{memory.agent_name}-{end}")
            agents.append(make_agent(named))
            metadata = seal(agents[-1].metadata())
            described.append(msgspec.structs.replace(named, metadata=metadata))
        source, target = agents
        return _write_a_page(source, target, described[1])
    except Exception as error:  # NIXL's own kinds: each of them says that it cannot
        return describe(error)
    finally:
        for agent in agents:
            agent.close()


def _write_a_page(source: NixlAgent, target: NixlAgent, memory: PeerMemory) -> str | None:
    source.add_peer(memory)
    handle = source.post(memory, Write(1, 0, memory.agent_name, (0,), (1,), b"there"))
    state = WriteState.POSTED
    until = time.monotonic() + TRY_S
    arrived: list[bytes] = []
    while time.monotonic() < until:
        if state is WriteState.POSTED:
            state = source.state(handle)
        arrived += target.notifications()
        if state is WriteState.BROKEN:
            return source.error(handle)
        if state is WriteState.LANDED and arrived:
            source.remove_peer(memory)
            return None
        time.sleep(POLL_S)
    return f"a page was not copied within {TRY_S:g} s"
