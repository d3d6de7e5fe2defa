"""Hosts that cannot reach each other for a while, or ever again: every text is right all the same.

Each test makes the transfers it is about slow first, by losing a share of the large packets, so
that the fault surely comes in mid-transfer; it looks at the nodes' queues to see that it did.
"""

import asyncio
from collections.abc import Callable

import pytest

from tests.multinode.lab import BULK, NODE_TIMEOUT_S, ROUTER, SOME, Lab, LabClient
from tests.multinode.network import Host, Network

PREFILL, DECODE = "prefill-0", "decode-0"
PARTED_S = 10.0
Fault = Callable[[Network, Host, Host], object]

FAULTS: dict[str, Fault] = {
    "both ways": lambda net, prefill, decode: net.part(prefill, decode),
    "prefill is not heard": lambda net, prefill, decode: net.block(prefill, decode),
    "decode is not heard": lambda net, prefill, decode: net.block(decode, prefill),
}


async def peers_lost(session: LabClient, names: list[str]) -> int:
    return sum([await session.counter(name, "peers_lost") for name in names])


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_prefill_is_parted_from_decode_in_mid_transfer(two_and_two: Lab, fault: Fault) -> None:
    lab = two_and_two

    async def run() -> None:
        async with lab.client() as session:
            before = await peers_lost(session, lab.names)
            lab.slow_down(PREFILL)
            tasks = session.ask(BULK)
            await session.until_moving(PREFILL)
            for decode in lab.partners(PREFILL):
                fault(lab.network, lab.host(PREFILL), lab.host(decode))
            await asyncio.sleep(PARTED_S)
            assert await peers_lost(session, lab.names) > before
            lab.network.heal()
            await session.check(BULK, tasks)
            await session.pages_home()
            await session.correct(SOME)

    asyncio.run(run())


@pytest.mark.parametrize("name", [PREFILL, DECODE])
def test_the_router_is_parted_from_a_node_for_longer_than_its_patience(
    two_and_two: Lab, name: str
) -> None:
    lab = two_and_two

    async def run() -> None:
        async with lab.client() as session:
            slowness = lab.slow_down(name)
            tasks = session.ask(BULK)
            await session.until_moving(name)
            lab.network.part(lab.host(ROUTER), lab.host(name))
            await asyncio.sleep(2 * NODE_TIMEOUT_S)
            assert name not in {node["name"] for node in await session.session.nodes()}
            for rule in slowness:
                lab.network.lift(rule)
            await session.check(BULK, tasks)
            lab.network.heal()
            await lab.fleet.ready()
            await session.pages_home()
            await session.correct(SOME)

    asyncio.run(run())


@pytest.mark.parametrize("name", [PREFILL, DECODE])
def test_a_host_is_cut_off_for_good_in_mid_transfer(two_and_two: Lab, name: str) -> None:
    """Its partners get their pages back although nobody will ever answer for it."""
    lab = two_and_two

    async def run() -> None:
        async with lab.client() as session:
            lab.slow_down(name)
            tasks = session.ask(BULK)
            await session.until_moving(name)
            lab.network.unplug(lab.host(name))
            await session.check(BULK, tasks)
            await session.pages_home(*lab.others(name))
            await session.correct(SOME)

    asyncio.run(run())
    lab.fleet[name].kill()


@pytest.mark.parametrize("name", [PREFILL, DECODE])
def test_a_node_is_replaced_by_another_process_on_its_address(two_and_two: Lab, name: str) -> None:
    """In mid-transfer; the next requests go through the newcomer, and nobody else is restarted."""
    lab = two_and_two

    async def run() -> None:
        async with lab.client() as session:
            pids = {n: (await session.node(n))["pid"] for n in lab.others(name)}
            slowness = lab.slow_down(name)
            tasks = session.ask(BULK)
            await session.until_moving(name)
            lab.replace(name)
            for rule in slowness:
                lab.network.lift(rule)
            await session.check(BULK, tasks)
            await lab.fleet.ready()
            await session.correct(SOME)
            assert await session.counter(name, "generated_tokens") > 0
            assert {n: (await session.node(n))["pid"] for n in pids} == pids
            await session.pages_home()

    asyncio.run(run())


def test_links_that_lose_packets_only_slow_things_down(two_and_two: Lab) -> None:
    lab = two_and_two
    hosts = [lab.host(name) for name in (ROUTER, *lab.names)]

    async def run() -> None:
        async with lab.client() as session:
            for one in hosts:
                for other in hosts:
                    if one != other:
                        lab.network.lose(one, other, 0.02)
            await session.correct(SOME)
            lab.network.heal()
            await session.pages_home()

    asyncio.run(run())
