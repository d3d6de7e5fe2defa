"""Clients that leave and nodes that fail, over real sockets with stand-in nodes."""

import asyncio
import json
from pathlib import Path

import pytest

from common.messages import Abort, Generate, PeerGone, TokenOutput
from tests.integration.client import dialled
from tests.integration.router_rig import (
    DECODE,
    IDS,
    PREFILL,
    Cluster,
    cluster,
    in_cluster,
    run,
)
from tests.standin import StandIn

# ---------------------------------------------------------------- clients that leave


def test_disconnect_in_mid_stream_aborts_on_both_nodes(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body = {"prompt": IDS, "max_tokens": 400, "stream": True}
        async with c.session.post(f"{c.url}/v1/completions", json=body) as response:
            await response.content.readline()
            response.close()
        await c.eventually(lambda: c.nodes["d1"].got(Abort))
        await c.eventually(lambda: not c.nodes["d1"].rooms)
        assert (await c.info())["requests"]["dispatched"] == 0

    in_cluster(model_folder, scenario)


def test_disconnect_without_a_stream_aborts_too(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = asyncio.create_task(c.complete(400))
        await c.eventually(lambda: c.nodes["d1"].rooms)
        asking.cancel()
        await c.eventually(lambda: not c.nodes["d1"].rooms, seconds=1.0)
        assert c.nodes["d1"].got(Abort)

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- nodes that fail


@pytest.mark.parametrize("victim", ["p", "d"])
def test_a_killed_node_does_not_change_the_text(model_folder: Path, victim: str) -> None:
    async def scenario(c: Cluster) -> None:
        prompts = [[*IDS, i] for i in range(40, 48)]
        asking = [asyncio.create_task(c.complete(60, prompt)) for prompt in prompts]
        await c.eventually(lambda: len(c.nodes["d2"].rooms) + len(c.nodes["d3"].rooms) == 8)
        dead = c.nodes["p0" if victim == "p" else "d2"]
        await dead.die()
        for prompt, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
            assert answer["choices"][0]["text"] == c.text(60, prompt)
            assert answer["usage"]["completion_tokens"] == 60
        survivor = c.nodes["d3"]
        await c.eventually(lambda: PeerGone(dead.incarnation) in survivor.received)

    in_cluster(model_folder, scenario, nodes="ppdd")


def test_a_silent_node_is_given_up_and_reset_when_it_returns(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = asyncio.create_task(c.complete(200))
        holder = c.nodes["d1"]
        await c.eventually(lambda: c.nodes["d1"].rooms or c.nodes["d2"].rooms)
        if not holder.rooms:
            holder = c.nodes["d2"]
        holder.mute()
        answer = await asking
        assert answer["choices"][0]["text"] == c.text(200)
        assert len((await c.info())["nodes"]) == 2
        holder.unmute()
        await c.eventually(lambda: holder.resets == 1)
        assert not holder.rooms
        assert len((await c.info())["nodes"]) == 3

    in_cluster(model_folder, scenario, nodes="pdd")


def test_a_lost_message_is_noticed_and_nothing_is_missing(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = asyncio.create_task(c.complete(100))
        await c.eventually(lambda: c.nodes["d1"].rooms)
        await asyncio.sleep(0.05)
        c.nodes["d1"].lose_message()
        assert (await asking)["choices"][0]["text"] == c.text(100)
        generates = c.nodes["d1"].got(Generate)
        assert [g.attempt for g in generates if isinstance(g, Generate)] == [1, 2]

    in_cluster(model_folder, scenario)


def test_retraction_continues_where_it_was(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body = {"prompt": IDS, "max_tokens": 80, "stream": True}
        asking = asyncio.create_task(c.lines("/v1/completions", body))
        for _ in range(4):
            await c.eventually(lambda: c.nodes["d1"].rooms)
            await asyncio.sleep(0.05)
            await c.nodes["d1"].retract_all()
        chunks = [json.loads(line[6:]) for line in await asking if line and "[DONE]" not in line]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == c.text(80)
        attempts = [g for g in c.nodes["d1"].got(Generate) if isinstance(g, Generate)]
        assert len({g.room for g in attempts}) == len(attempts) == 5

    in_cluster(model_folder, scenario)


def test_without_nodes_it_is_503_and_a_lost_last_node_too(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        status, answer = await c.post("/v1/completions", {"prompt": IDS})
        assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
        async with (
            StandIn(PREFILL, c.node_address),
            StandIn(DECODE, c.node_address, silent_decode=True) as decode,
        ):
            asking = asyncio.create_task(c.post("/v1/completions", {"prompt": IDS}))
            await c.eventually(lambda: decode.rooms)
            await decode.die()
            status, answer = await asking
            assert status == 503

    in_cluster(model_folder, scenario, nodes="")


def test_an_error_in_a_begun_stream_is_an_event_and_the_end(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body = {"prompt": IDS, "max_tokens": 400, "stream": True}
        asking = asyncio.create_task(c.lines("/v1/completions", body))
        await c.eventually(lambda: c.nodes["d1"].rooms)
        await asyncio.sleep(0.1)
        await c.nodes["d1"].die()
        lines = [line for line in await asking if line]
        assert lines[-1] == "data: [DONE]"
        error = json.loads(lines[-2][6:])["error"]
        assert (error["code"], error["type"]) == ("no_node", "service_unavailable_error")
        assert len(lines) > 3

    in_cluster(model_folder, scenario, node_wait_s=0.2)


def test_a_router_that_ends_answers_everybody_first(model_folder: Path) -> None:
    async def work() -> None:
        async with cluster(model_folder) as c:
            asking = asyncio.create_task(
                c.post("/v1/completions", {"prompt": IDS, "max_tokens": 400})
            )
            await c.eventually(lambda: c.nodes["d1"].rooms)
            c.router.cancel()
            status, answer = await asking
            assert (status, answer["error"]["code"]) == (503, "shutting_down")
            await c.eventually(lambda: c.nodes["d1"].got(Abort))
            await asyncio.wait([c.router], timeout=5)
            assert c.router.cancelled()

    run(work())


def test_garbage_on_the_node_port_is_counted_and_forgotten(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        node = c.nodes["p0"]
        for payload in (b"", b"\xc1\xff", b"not a message", b"\x94\xa1a\xa1b\x01\x81"):
            await node.send_raw(payload)
        await node.send_tokens(TokenOutput(room=12345, index=0, token_ids=[1]))
        assert (await c.complete(10))["choices"][0]["text"] == c.text(10)
        async with c.session.get(f"{c.url}/metrics") as response:
            text = await response.text()
        assert 'pdserve_router_events_total{kind="garbage_frames"} 4.0' in text
        assert 'pdserve_router_events_total{kind="stale_rooms"} 1.0' in text

    in_cluster(model_folder, scenario)


def test_bytes_that_are_not_http_are_counted_and_forgotten(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        for payload in (b"\x00\xff\x80\r\n\r\n", b"POST \xff nothing\r\n\r\n"):
            async with dialled(c.url) as (reader, writer):
                writer.write(payload)
                await reader.read(1000)
        assert (await c.complete(10))["choices"][0]["text"] == c.text(10)
        async with c.session.get(f"{c.url}/metrics") as response:
            assert 'kind="garbage_http"} 2.0' in await response.text()

    in_cluster(model_folder, scenario)
