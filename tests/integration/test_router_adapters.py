"""Adapters on a live cluster of stand-in nodes: loads, unloads, joins and losses."""

import asyncio
from pathlib import Path
from typing import Any

from common.messages import Admin, Generate, LoadAdapter, UnloadAdapter
from tests.integration.router_rig import (
    DECODE,
    IDS,
    PREFILL,
    Cluster,
    in_cluster,
)
from tests.standin import StandIn, expected_tokens


def put_on_disk(c: Cluster, **contents: str) -> None:
    """Each node can read `/NAME`."""
    for node in c.nodes.values():
        node.disk.update({f"/{name}": digest for name, digest in contents.items()})


async def load(c: Cluster, name: str, path: str | None = None, **more: Any) -> tuple[int, Any]:
    body = {"lora_name": name, "lora_path": path or f"/{name}", **more}
    return await c.post("/load_lora_adapter", body)


async def unload(c: Cluster, name: str) -> tuple[int, Any]:
    return await c.post("/unload_lora_adapter", {"lora_name": name})


async def ask(c: Cluster, model: str, max_tokens: int = 5, **more: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": IDS, "max_tokens": max_tokens, **more}
    return await c.post("/v1/completions", body)


def text(c: Cluster, count: int, digest: str) -> str:
    return c.codec.decode(expected_tokens(IDS, count, digest))


def verbs(node: StandIn, kind: type) -> list[object]:
    return [m.verb for m in node.got(Admin) if isinstance(m, Admin) and isinstance(m.verb, kind)]


async def joined(c: Cluster, node: StandIn) -> None:
    """Until the router gives it work."""
    async with asyncio.timeout(5):
        while True:
            nodes = {n["name"]: n for n in (await c.info())["nodes"]}
            if nodes.get(node.name, {}).get("equipped"):
                return
            await asyncio.sleep(0.02)


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
        dying = c.nodes["d2"]
        dying.shelf.hold()
        loading = asyncio.create_task(load(c, "one"))
        await c.eventually(lambda: dying.shelf.waiting or verbs(dying, LoadAdapter))
        await dying.die()
        status, answer = await loading
        assert status == 200, answer
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
        async with asyncio.timeout(5):
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
        async with asyncio.timeout(5):
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


# ---------------------------------------------------------------- nodes come and go


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
            for _ in range(4):
                assert (await ask(c, "one"))[0] == 200
            assert late.got(Generate)

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
        for _ in range(4):
            assert (await ask(c, "one"))[0] == 200
        used = [g.adapter for g in c.nodes["d1"].got(Generate) if isinstance(g, Generate)]
        assert not any(used)
        await c.nodes["d2"].shelf.drop("one")
        await c.nodes["p0"].shelf.drop("one")
        async with asyncio.timeout(5):
            while (await ask(c, "one"))[0] != 404:
                await asyncio.sleep(0.02)

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
        async with asyncio.timeout(5):
            while (await c.info())["adapters"][0]["nodes"] != ["p0"]:
                await asyncio.sleep(0.02)

    in_cluster(model_folder, scenario)
