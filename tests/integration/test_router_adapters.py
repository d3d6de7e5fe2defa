"""Adapters are loaded and unloaded on a live cluster of stand-in nodes, over real sockets."""

import asyncio
from pathlib import Path

from common.messages import LoadAdapter, UnloadAdapter
from tests.integration.adapter_requests import (
    ask,
    joined,
    load,
    put_on_disk,
    text,
    unload,
    verbs,
)
from tests.integration.router_rig import IDS, Cluster, in_cluster
from tests.standin import expected_tokens

# ---------------------------------------------------------------- the plain walk


def test_an_adapter_is_loaded_listed_used_and_unloaded(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1", two="c2")
        status, answer = await load(c, "one", pinned=True)
        assert status == 200, answer
        assert (answer["success"], answer["digest"]) == (True, "c1")
        assert answer["loaded_adapters"] == {"one": "/one"}
        assert {node["name"] for node in answer["nodes"]} == {"p0", "d1"}
        assert (await c.post("/v1/load_lora_adapter", {"lora_name": "two", "lora_path": "/two"}))[
            0
        ] == 200
        cards = (await c.get("/v1/models"))[1]["data"]
        assert [(card["id"], card["root"], card["parent"]) for card in cards[1:]] == [
            ("one", "/one", "tiny"),
            ("two", "/two", "tiny"),
        ]
        for name in ("one", "tiny:one"):
            assert (await c.get(f"/v1/models/{name}"))[1]["id"] == "one"
            status, answer = await ask(c, name)
            assert (status, answer["model"]) == (200, name)
            assert answer["choices"][0]["text"] == text(c, 5, "c1")
        assert (await ask(c, "tiny", lora_path="/two"))[1]["choices"][0]["text"] == text(c, 5, "c2")
        assert (await c.complete(5))["choices"][0]["text"] == c.text(5)
        info = await c.info()
        assert info["adapters"][0] == {
            "name": "one", "path": "/one", "digest": "c1", "pinned": True, "state": "ready",
            "running": 0, "nodes": ["p0", "d1"],
        }  # fmt: skip
        assert (await unload(c, "one"))[0] == 200
        assert [set(node.shelf.holds()) for node in c.nodes.values()] == [{"two"}, {"two"}]
        status, answer = await ask(c, "one")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert await c.metric('pdserve_router_lora_requests_total{adapter="one"}') == 2

    in_cluster(model_folder, scenario)


def test_prompts_of_one_request_have_adapters_of_their_own(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1", two="c2")
        await load(c, "one")
        await load(c, "two")
        body = {
            "input_ids": [IDS, IDS, IDS],
            "lora_path": ["one", None, "/two"],
            "sampling_params": {"max_new_tokens": 5, "temperature": 0},
        }
        status, answers = await c.post("/generate", body)
        assert status == 200, answers
        assert [a["output_ids"] for a in answers] == [
            expected_tokens(IDS, 5, digest) for digest in ("c1", "", "c2")
        ]

    in_cluster(model_folder, scenario)


def test_the_words_of_refusals(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        assert (await load(c, "one"))[0] == 200
        expectations = [
            (await load(c, "one"), 400, "already loaded"),
            (await unload(c, "two"), 404, "was never loaded"),
            (await load(c, "two"), 400, "p0: adapter 'two' is incompatible"),
            (await load(c, "tiny"), 400, "model's own name"),
            (await load(c, "a:b"), 400, "colon"),
            (await load(c, " a"), 400, "space"),
            (await load(c, "a" * 257), 400, "256"),
            (await c.post("/load_lora_adapter", {"lora_name": "a", "lora_path": ""}), 400, "path"),
            (await c.post("/load_lora_adapter", {"lora_name": "a"}), 400, "lora_path"),
            (await c.post("/unload_lora_adapter", {}), 400, "lora_name"),
            (await ask(c, "tiny:two"), 404, "does not exist"),
            (await ask(c, "tiny", lora_path="two"), 404, "not loaded"),
            (await ask(c, "one", lora_path="one"), 200, ""),
        ]
        for (status, answer), expected, words in expectations:
            assert status == expected, answer
            if words:
                assert words in answer["error"]["message"]
        status, answer = await load(c, "two")
        assert answer["success"] is False
        assert answer["loaded_adapters"] == {"one": "/one"}
        assert "incompatible" in answer["error_message"]

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- all or nothing


def test_a_node_that_refuses_leaves_the_adapter_on_none(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        c.nodes["p0"].disk["/one"] = "c1"
        status, answer = await load(c, "one")
        assert status == 400
        assert "d1" in answer["error_message"]
        assert not c.nodes["p0"].shelf.holds()
        assert (await ask(c, "one"))[0] == 404
        put_on_disk(c, one="c1")
        assert (await load(c, "one"))[0] == 200

    in_cluster(model_folder, scenario)


def test_nodes_that_read_different_content_are_not_served_together(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        c.nodes["p0"].disk["/one"] = "c1"
        c.nodes["d1"].disk["/one"] = "c2"
        status, answer = await load(c, "one")
        assert status == 400
        assert "differs" in answer["error_message"]
        assert [node.shelf.holds() for node in c.nodes.values()] == [{}, {}]

    in_cluster(model_folder, scenario)


def test_a_node_that_is_late_gets_the_unload_behind_its_load(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        late = c.nodes["d1"]
        late.shelf.hold()
        status, answer = await load(c, "one")
        assert (status, answer["error"]["code"]) == (503, "adapter_timeout")
        assert "d1: no answer" in answer["error_message"]
        assert not c.nodes["p0"].shelf.holds()
        late.shelf.let_go()
        await c.eventually(lambda: verbs(late, UnloadAdapter) and not late.shelf.waiting)
        assert not late.shelf.holds()
        assert (await load(c, "one"))[0] == 200

    in_cluster(model_folder, scenario, lora_load_timeout_s=0.3)


def test_a_node_that_dies_in_mid_load_does_not_count(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        dying, living = c.nodes["d2"], (c.nodes["p0"], c.nodes["d1"])
        for node in c.nodes.values():
            node.shelf.hold()
        loading = asyncio.create_task(load(c, "one"))
        await c.eventually(lambda: all(verbs(node, LoadAdapter) for node in c.nodes.values()))
        await dying.die()
        while len((await c.info())["nodes"]) > len(living):
            await asyncio.sleep(0.02)
        for node in living:
            node.shelf.let_go()
        status, answer = await loading
        assert (status, answer["digest"]) == (200, "c1"), answer
        assert {node["name"] for node in answer["nodes"] if node["ok"]} == {"p0", "d1"}
        assert (await ask(c, "one"))[0] == 200

    in_cluster(model_folder, scenario, nodes="pdd")


def test_a_load_without_nodes_is_503(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        assert (await load(c, "one"))[0] == 503
        assert (await unload(c, "one"))[0] == 404

    in_cluster(model_folder, scenario, nodes="")


def test_of_two_loads_of_one_name_one_wins(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1", two="c2")
        c.nodes["d1"].shelf.hold()
        first = asyncio.create_task(load(c, "one"))
        other = asyncio.create_task(load(c, "two"))
        await c.eventually(lambda: len(verbs(c.nodes["d1"], LoadAdapter)) == 2)
        status, answer = await load(c, "one")
        assert (status, answer["error"]["code"]) == (409, "adapter_loading")
        assert (await unload(c, "one"))[0] == 409
        c.nodes["d1"].shelf.let_go()
        assert [(await first)[0], (await other)[0]] == [200, 200]

    in_cluster(model_folder, scenario)


def test_a_client_that_hangs_up_does_not_stop_the_load(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        c.nodes["d1"].shelf.hold()
        loading = asyncio.create_task(load(c, "one"))
        await c.eventually(lambda: verbs(c.nodes["d1"], LoadAdapter))
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await asyncio.sleep(0.1)
        c.nodes["d1"].shelf.let_go()
        await c.eventually(c.nodes["d1"].shelf.holds)
        assert (await ask(c, "one"))[0] == 200

    in_cluster(model_folder, scenario)


def test_a_router_that_ends_undoes_a_load(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        c.nodes["d1"].shelf.hold()
        loading = asyncio.create_task(load(c, "one"))
        await c.eventually(c.nodes["p0"].shelf.holds)
        c.end.set()
        await asyncio.wait_for(c.router, 30)
        await asyncio.gather(loading, return_exceptions=True)
        await c.eventually(lambda: not c.nodes["p0"].shelf.holds())
        c.nodes["d1"].shelf.let_go()
        await c.eventually(lambda: verbs(c.nodes["d1"], UnloadAdapter))
        await c.eventually(lambda: not c.nodes["d1"].shelf.waiting)
        assert not c.nodes["d1"].shelf.holds()

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- unload


def test_an_unload_waits_for_running_requests_and_refuses_new_ones_at_once(
    model_folder: Path,
) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        await load(c, "one")
        running = asyncio.create_task(ask(c, "one", 60))
        await c.eventually(lambda: c.nodes["d1"].rooms)
        unloading = asyncio.create_task(unload(c, "one"))
        async with asyncio.timeout(30):
            while (await ask(c, "one"))[0] != 404:
                await asyncio.sleep(0.01)
        assert not running.done()
        assert not verbs(c.nodes["d1"], UnloadAdapter)
        _, answer = await running
        assert answer["choices"][0]["text"] == text(c, 60, "c1")
        assert (await unloading)[0] == 200
        assert not c.nodes["d1"].shelf.holds()

    in_cluster(model_folder, scenario)


def test_an_unload_that_takes_too_long_says_how_many_run_and_can_be_asked_for_again(
    model_folder: Path,
) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        await load(c, "one")
        running = asyncio.create_task(ask(c, "one", 100, n=2))
        await c.eventually(lambda: len(c.nodes["d1"].rooms) == 2)
        status, answer = await unload(c, "one")
        assert (status, answer["error"]["code"]) == (503, "adapter_in_use")
        assert "2 are still running" in answer["error_message"]
        assert (await ask(c, "one"))[0] == 404
        assert (await load(c, "one"))[0] == 409
        await c.post("/abort_request", {"abort_all": True})
        await running
        assert (await unload(c, "one"))[0] == 200
        assert (await load(c, "one"))[0] == 200

    in_cluster(model_folder, scenario, lora_unload_timeout_s=0.3)


def test_an_unload_comes_to_its_end_without_nodes_and_a_returning_node_is_told(
    model_folder: Path,
) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        await load(c, "one")
        away = c.nodes["d1"]
        away.mute()
        await c.nodes["p0"].die()
        async with asyncio.timeout(30):
            while (await c.info())["nodes"]:
                await asyncio.sleep(0.05)
        assert (await unload(c, "one"))[0] == 200
        away.unmute()
        await joined(c, away)
        assert not away.shelf.holds()
        assert (await c.get("/v1/models/one"))[0] == 404
        assert not (await c.info())["adapters"]

    in_cluster(model_folder, scenario)


def test_a_request_in_arrival_is_refused_once_its_adapter_is_unloaded(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        put_on_disk(c, one="c1")
        await load(c, "one")
        asking = [asyncio.create_task(ask(c, "one", 3)) for _ in range(20)]
        unloading = asyncio.create_task(unload(c, "one"))
        statuses = {(await task)[0] for task in asking}
        assert statuses <= {200, 404}
        assert (await unloading)[0] == 200
        for node in c.nodes.values():
            assert not node.rooms

    in_cluster(model_folder, scenario)
