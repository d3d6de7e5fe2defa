"""Readiness, and leaving: the router itself and single nodes, over real sockets with stand-ins."""

import asyncio
import json
from pathlib import Path
from typing import Any

from common.messages import Generate, Peers
from tests.integration.router_rig import DECODE, IDS, PREFILL, Cluster, in_cluster
from tests.standin import StandIn


async def stream(c: Cluster, max_tokens: int) -> list[Any]:
    """The events of a streamed completion."""
    body = {"prompt": IDS, "max_tokens": max_tokens, "stream": True}
    lines = await c.lines("/v1/completions", body)
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if "choices" in event)


async def readiness(c: Cluster) -> tuple[int, str]:
    status, answer = await c.get("/health/ready")
    return status, answer.get("reason", "")


async def until_ready(c: Cluster) -> None:
    async with asyncio.timeout(30):
        while await readiness(c) != (200, ""):
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------- readiness


def test_ready_means_a_pair_that_has_shaken_hands(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        assert (await c.get("/health/live"))[0] == 200
        assert await readiness(c) == (503, "no prefill node is available")
        async with StandIn(PREFILL, c.node_address, "p9") as prefill:
            assert await readiness(c) == (503, "no decode node is available")
            decode = StandIn(DECODE, c.node_address, "d9", shakes_hands=False)
            async with decode:
                status, reason = await readiness(c)
                assert (status, "shaken hands" in reason) == (503, True), reason
                assert (await c.get("/health"))[0] == 200
                await c.eventually(lambda: decode.got(Peers))
                (peers,) = decode.got(Peers)
                assert isinstance(peers, Peers)
                decode.linked_peers = [peer.incarnation for peer in peers.nodes]
                assert decode.linked_peers == [prefill.incarnation]
                await until_ready(c)

    in_cluster(model_folder, scenario, "")


def test_decode_hears_of_every_change_of_its_prefill_nodes(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        first, decode = c.nodes["p0"], c.nodes["d1"]
        await c.eventually(lambda: decode.linked_peers == [first.incarnation])
        async with StandIn(first.role, c.node_address, "p9") as second:
            await c.eventually(
                lambda: set(decode.linked_peers) == {first.incarnation, second.incarnation}
            )
            await second.say_goodbye()
            await c.eventually(lambda: decode.linked_peers == [first.incarnation])
        first.draining = True
        await c.eventually(lambda: decode.linked_peers == [])

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- one node leaves


def test_a_draining_node_gets_nothing_new_and_finishes_what_it_has(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = [asyncio.create_task(c.complete(100)) for _ in range(4)]
        await c.eventually(lambda: len(c.nodes["d1"].rooms) + len(c.nodes["d2"].rooms) == 4)
        status, answer = await c.post("/drain", {"node": "d1"})
        assert (status, answer["nodes"][0]["name"]) == (200, "d1"), answer
        before = len(c.nodes["d1"].got(Generate))
        for _ in range(4):
            await c.complete(3)
        assert len(c.nodes["d1"].got(Generate)) == before
        for answer in await asyncio.gather(*asking):
            assert answer["choices"][0]["text"] == c.text(100)
        states = {node["name"]: node["state"] for node in (await c.info())["nodes"]}
        assert states == {"p0": "ready", "d1": "draining", "d2": "ready"}

    in_cluster(model_folder, scenario, "pdd")


def test_draining_a_node_that_is_not_there_is_404(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        status, answer = await c.post("/drain", {"node": "nobody"})
        assert (status, answer["error"]["code"]) == (404, "unknown_node")
        await until_ready(c)

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- the router leaves


def test_a_draining_router_finishes_its_streams_and_takes_nothing_new(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        streams = [asyncio.create_task(stream(c, 100)) for _ in range(4)]
        await c.eventually(lambda: len(c.nodes["d1"].rooms) == 4)
        assert (await c.post("/drain", {}))[0] == 200
        assert await readiness(c) == (503, "the router is draining")
        assert (await c.get("/health/live"))[0] == 200
        status, answer = await c.post("/v1/completions", {"prompt": IDS, "max_tokens": 3})
        assert (status, answer["error"]["code"]) == (503, "draining")
        for events in await asyncio.gather(*streams):
            assert text_of(events) == c.text(100)
        await asyncio.wait_for(c.router, 30)

    in_cluster(model_folder, scenario)


def test_an_idle_router_drains_at_once(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        c.end.set()
        await asyncio.wait_for(c.router, 30)

    in_cluster(model_folder, scenario, drain_s=600.0)


def test_what_is_unfinished_when_the_time_is_over_ends_with_an_error(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        streaming = asyncio.create_task(stream(c, 400))
        asking = asyncio.create_task(c.post("/v1/completions", {"prompt": IDS, "max_tokens": 400}))
        await c.eventually(lambda: len(c.nodes["d1"].rooms) == 2)
        c.end.set()
        status, answer = await asking
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        events = await streaming
        assert events[-1]["error"]["code"] == "shutting_down"
        assert c.text(400).startswith(text_of(events))
        await asyncio.wait_for(c.router, 30)
        await c.eventually(lambda: not c.nodes["d1"].rooms)

    in_cluster(model_folder, scenario, drain_s=0.2)
