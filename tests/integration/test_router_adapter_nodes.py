"""Nodes with and without adapters come and go, over real sockets with stand-in nodes."""

import asyncio
from pathlib import Path

from common.messages import Generate, LoadAdapter, UnloadAdapter
from tests.integration.adapter_requests import (
    ask,
    joined,
    load,
    put_on_disk,
    text,
    unload,
    verbs,
)
from tests.integration.router_rig import DECODE, PREFILL, Cluster, in_cluster
from tests.standin import StandIn


def test_a_node_that_joins_is_given_the_adapters_before_it_takes_work(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        await load(c, "one", pinned=True)
        late = StandIn(DECODE, c.node_address, "late", disk={"/one": "c1"})
        late.shelf.hold()
        async with late:
            await c.eventually(lambda: verbs(late, LoadAdapter))
            assert verbs(late, LoadAdapter) == [
                LoadAdapter(name="one", path="/one", pinned=True, digest="c1")
            ]
            for _ in range(4):
                await c.complete(3)
            assert not late.got(Generate)
            late.shelf.let_go()
            await joined(c, late)
            async with asyncio.timeout(30):
                while not late.got(Generate):  # equals are drawn by chance
                    assert (await ask(c, "one"))[0] == 200

    in_cluster(model_folder, scenario)


def test_a_node_without_the_content_takes_work_of_the_base_model_only(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        await load(c, "one")
        other = StandIn(DECODE, c.node_address, "other", disk={"/one": "c2"})
        async with other:
            await joined(c, other)
            for _ in range(6):
                assert (await ask(c, "one"))[0] == 200
                await c.complete(3)
            asked = [g.adapter for g in other.got(Generate) if isinstance(g, Generate)]
            assert asked
            assert set(asked) == {None}
            assert await c.metric('pdserve_router_lora_loads_total{outcome="not_given"}') == 1

    in_cluster(model_folder, scenario)


def test_a_node_that_never_answers_takes_work_after_a_while(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        await load(c, "one")
        await c.nodes["d1"].die()
        slow = StandIn(DECODE, c.node_address, "slow")
        slow.shelf.hold()
        async with slow:
            await c.complete(3)
            assert slow.got(Generate)
            status, answer = await ask(c, "one")
            assert (status, answer["error"]["code"]) == (503, "adapter_unavailable")
            assert "no decode node" in answer["error"]["message"]

    in_cluster(model_folder, scenario, lora_load_timeout_s=0.5, node_wait_s=5.0)


def test_a_router_that_starts_learns_from_its_nodes_and_passes_it_on(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        empty = StandIn(DECODE, c.node_address, "d", disk={"/own": "c1"})
        async with empty:
            await joined(c, empty)
            holder = StandIn(PREFILL, c.node_address, "p")
            holder.shelf.put("one", "c1")
            async with holder:
                await c.eventually(lambda: empty.shelf.holds() == {"one": "c1"})
                assert (await ask(c, "one"))[0] == 200

    in_cluster(model_folder, scenario, nodes="")


def test_the_first_node_decides_the_content_of_what_the_command_line_names(
    model_folder: Path,
) -> None:
    async def scenario(c: Cluster) -> None:
        assert (await ask(c, "one"))[0] == 503
        first = StandIn(PREFILL, c.node_address, "p", disk={"/one": "c1"})
        second = StandIn(DECODE, c.node_address, "d", disk={"/one": "c1"})
        third = StandIn(DECODE, c.node_address, "x", disk={"/one": "c2"})
        async with first, second, third:
            for node in (first, second, third):
                await joined(c, node)
            assert [n.shelf.holds() for n in (first, second)] == [{"one": "c1"}, {"one": "c1"}]
            assert third.shelf.holds() == {}
            status, answer = await ask(c, "tiny:one")
            assert (status, answer["choices"][0]["text"]) == (200, text(c, 5, "c1"))

    in_cluster(model_folder, scenario, nodes="", lora=("one=/one",))


def test_a_node_that_lost_an_adapter_on_its_own_is_no_candidate_any_more(
    model_folder: Path,
) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        await load(c, "one")
        await c.nodes["d1"].shelf.drop("one")
        async with asyncio.timeout(30):
            while "d1" in (await c.info())["adapters"][0]["nodes"]:
                await asyncio.sleep(0.02)
        for _ in range(4):
            assert (await ask(c, "one"))[0] == 200
        used = [g.adapter for g in c.nodes["d1"].got(Generate) if isinstance(g, Generate)]
        assert not any(used)
        await c.nodes["d2"].shelf.drop("one")
        await c.nodes["p0"].shelf.drop("one")
        async with asyncio.timeout(30):
            while (await ask(c, "one"))[0] != 404:
                await asyncio.sleep(0.02)

    in_cluster(model_folder, scenario, nodes="pdd")


def test_an_unload_that_a_node_slept_through_takes_nothing_that_was_loaded_since(
    model_folder: Path,
) -> None:
    """The verb lies there unread; the node is given up, and wakes up to do it after it was greeted
    anew, when the cluster has the same adapter again."""

    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        await load(c, "one")
        sleeper = c.nodes["d1"]
        sleeper.shelf.hold()
        unloading = asyncio.create_task(unload(c, "one"))
        await c.eventually(lambda: verbs(sleeper, UnloadAdapter))
        sleeper.mute()
        assert (await unloading)[0] == 200
        assert (await load(c, "one"))[0] == 200
        sleeper.unmute()
        async with asyncio.timeout(30):
            while len((await c.info())["nodes"]) < len(c.nodes):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)  # its list has come; what it was asked before is not done yet
        sleeper.shelf.let_go()
        async with asyncio.timeout(30):
            while set((await c.info())["adapters"][0]["nodes"]) != set(c.nodes):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        assert sleeper.shelf.holds() == {"one": "c1"}

    in_cluster(model_folder, scenario, nodes="pdd")


def test_replays_keep_the_adapter(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        await load(c, "one")
        asking = asyncio.create_task(ask(c, "one", 100))
        await c.eventually(lambda: c.nodes["d1"].rooms or c.nodes["d2"].rooms)
        holder = c.nodes["d1"] if c.nodes["d1"].rooms else c.nodes["d2"]
        await holder.retract_all()
        await c.eventually(lambda: c.nodes["d1"].rooms or c.nodes["d2"].rooms)
        holder = c.nodes["d1"] if c.nodes["d1"].rooms else c.nodes["d2"]
        await holder.die()
        status, answer = await asking
        assert (status, answer["choices"][0]["text"]) == (200, text(c, 100, "c1"))

    in_cluster(model_folder, scenario, nodes="pdd")


def test_after_a_gap_the_nodes_list_is_heard_anew(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        await load(c, "one")
        node = c.nodes["d1"]
        del node.shelf.infos["one"]  # and the list that says so is lost
        node.lose_message()
        async with asyncio.timeout(30):
            while (await c.info())["adapters"][0]["nodes"] != ["p0"]:
                await asyncio.sleep(0.02)

    in_cluster(model_folder, scenario)
