"""Pause, abort, limits and information, over real sockets with stand-in nodes."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from common.messages import Generate
from tests.integration.router_rig import (
    IDS,
    Cluster,
    in_cluster,
)

# ---------------------------------------------------------------- pause


def test_pause_in_place_holds_everything_until_continue(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = [asyncio.create_task(c.complete(60)) for _ in range(4)]
        await c.eventually(lambda: len(c.nodes["d1"].rooms) == 4)
        status, answer = await c.post("/pause_generation", {"mode": "in_place"})
        assert status == 200, answer
        assert {node["name"] for node in answer["nodes"]} == {"p0", "d1"}
        late = asyncio.create_task(c.complete(5))
        await asyncio.sleep(0.4)
        assert not any(task.done() for task in [*asking, late])
        assert (await c.info())["requests"]["queued"] == 1
        assert (await c.post("/continue_generation", {}))[0] == 200
        for answer in await asyncio.gather(*asking):
            assert answer["choices"][0]["text"] == c.text(60)
        assert (await late)["choices"][0]["text"] == c.text(5)

    in_cluster(model_folder, scenario)


def test_pause_retract_gives_everything_back_and_replays_it(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = [asyncio.create_task(c.complete(60)) for _ in range(4)]
        await c.eventually(lambda: len(c.nodes["d1"].rooms) == 4)
        await c.post("/pause_generation", {"mode": "retract"})
        await c.eventually(lambda: not c.nodes["d1"].rooms)
        assert (await c.post("/flush_cache", {}))[0] == 200
        assert (await c.info())["requests"]["queued"] == 4
        await c.post("/continue_generation", {})
        for answer in await asyncio.gather(*asking):
            assert answer["choices"][0]["text"] == c.text(60)

    in_cluster(model_folder, scenario)


def test_pause_abort_ends_all_with_reason_abort(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = [asyncio.create_task(c.complete(400)) for _ in range(3)]
        await c.eventually(lambda: len(c.nodes["d1"].rooms) == 3)
        assert (await c.post("/pause_generation", None))[0] == 200
        for answer in await asyncio.gather(*asking):
            assert answer["choices"][0]["finish_reason"] == "abort"
        held = asyncio.create_task(c.complete(5))
        await asyncio.sleep(0.1)
        assert (await c.post("/abort_request", {"abort_all": True}))[0] == 200
        assert (await held)["choices"][0]["finish_reason"] == "abort"
        await c.post("/continue_generation", {})
        assert (await c.complete(5))["choices"][0]["text"] == c.text(5)

    in_cluster(model_folder, scenario)


def test_pausing_one_node_moves_work_to_the_others(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        assert (await c.post("/pause_generation", {"mode": "retract", "node": "d1"}))[0] == 200
        for _ in range(4):
            await c.complete(5)
        assert not c.nodes["d1"].got(Generate)
        assert (await c.post("/continue_generation", {"node": "d1"}))[0] == 200
        assert (await c.post("/pause_generation", {"mode": "retract", "node": "d2"}))[0] == 200
        await c.complete(5)
        assert c.nodes["d1"].got(Generate)
        assert (await c.post("/pause_generation", {"node": "nobody"}))[0] == 404
        assert (await c.post("/pause_generation", {"mode": "now"}))[0] == 400

    in_cluster(model_folder, scenario, nodes="pdd")


def test_a_verb_does_not_wait_for_ever(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        c.nodes["d1"].mute()
        status, answer = await c.post("/flush_cache", {"node": "d1"})
        assert status == 400
        assert "d1" in answer["message"]

    in_cluster(model_folder, scenario, admin_timeout_s=0.3)


def test_abort_by_request_id(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body = {"prompt": IDS, "max_tokens": 400}
        headers = {"X-Request-Id": "job-7"}
        asking = asyncio.create_task(c.post("/v1/completions", body, headers=headers))
        other = asyncio.create_task(c.complete(60))
        await c.eventually(lambda: len(c.nodes["d1"].rooms) == 2)
        await c.post("/abort_request", {"rid": "job-7"})
        _, answer = await asking
        assert answer["id"] == "cmpl-job-7"
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert (await other)["choices"][0]["text"] == c.text(60)

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- limits and info


def test_too_many_unfinished_requests_are_429(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = [asyncio.create_task(c.complete(50)) for _ in range(3)]
        await c.eventually(lambda: len(c.nodes["d1"].rooms) == 3)
        async with c.session.post(f"{c.url}/v1/completions", json={"prompt": IDS}) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
        await asyncio.gather(*asking)

    in_cluster(model_folder, scenario, max_requests=3)


def test_bodies_over_the_limit_are_413_with_the_error_shape(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        status, answer = await c.post("/v1/completions", {"prompt": "a" * 5000})
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        async with c.session.get(f"{c.url}/nowhere") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "unknown_url"

    in_cluster(model_folder, scenario, max_body_bytes=4096)


def test_server_info_lists_nodes_and_the_log_has_one_line_a_request(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(c: Cluster) -> None:
        await c.complete(5)
        nodes = {node["name"]: node for node in (await c.info())["nodes"]}
        assert nodes["p0"]["role"] == "prefill"
        needed = "name role url pid state running free_pages cached_pages num_pages incarnation"
        assert set(needed.split()) <= set(nodes["d1"])
        assert nodes["d1"]["num_pages"] == 64

    with caplog.at_level(logging.INFO, "router.requests"):
        in_cluster(model_folder, scenario)
    (record,) = [r for r in caplog.records if r.name == "router.requests"]
    line = json.loads(record.getMessage())
    assert (line["outcome"], line["output_tokens"], line["attempts"]) == ("length", 5, 1)
    assert line["dispatched_s"] <= line["first_token_s"] <= line["ended_s"]
