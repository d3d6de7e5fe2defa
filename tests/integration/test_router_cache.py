"""What nodes say of their caches, over real sockets: where requests go, and what nonsense costs."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from common.messages import Generate, ListCache
from router.page_keys import Lineage, PageKeys
from tests.integration.router_rig import Cluster, in_cluster
from tests.standin import FINGERPRINT, StandIn

PROMPT = [40 + i % 30 for i in range(100)]
KEYS = PageKeys().of_prefix(Lineage(FINGERPRINT, ""), PROMPT)
NODES = "ppdd"
KNOWN = "pdserve_router_index_pages"


def happened(kind: str) -> str:
    return f'pdserve_router_index_events_total{{kind="{kind}"}}'


async def await_metric(c: Cluster, name: str, value: int) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(20):
            while await c.metric(name) != value:
                await asyncio.sleep(0.01)
    assert await c.metric(name) == value


def asked(node: StandIn) -> int:
    return len(node.got(Generate))


async def takes_all(c: Cluster, *nodes: str) -> bool:
    """Whether these nodes, and no others, get requests with the prompt."""
    before = {name: asked(node) for name, node in c.nodes.items()}
    for i in range(4):
        await c.complete(2, [*PROMPT, 50 + i])
    return all(
        asked(node) - before[name] == (4 if name in nodes else 0) for name, node in c.nodes.items()
    )


def test_requests_go_where_their_prefix_is_and_away_when_it_is_gone(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        for name in ("p1", "d3"):
            await c.nodes[name].publish(*KEYS)
        await await_metric(c, happened("updates"), 2)
        assert await takes_all(c, "p1", "d3")
        routed = "pdserve_router_routed_tokens_total"
        assert await c.metric(f'{routed}{{kind="prompt"}}') == 4 * (len(PROMPT) + 1)
        assert await c.metric(f'{routed}{{kind="computer_cached"}}') == 4 * 16 * len(KEYS)
        for name in ("p1", "d3"):
            await c.nodes[name].publish(reset=True)
        for name in ("p0", "d2"):
            await c.nodes[name].publish(*KEYS)
        await await_metric(c, happened("updates"), 6)
        assert await takes_all(c, "p0", "d2")

    in_cluster(model_folder, scenario, NODES)


def test_a_lost_update_has_the_node_say_all_again(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        node = c.nodes["p1"]
        await node.publish(*KEYS[:2])
        node.lose_update()
        await node.publish(*KEYS[2:])
        await c.eventually(lambda: node.got(ListCache))
        await await_metric(c, KNOWN, len(KEYS))
        assert await c.metric(happened("gaps")) == 1
        assert node.resets == 0, "the link itself is as good as before"

    in_cluster(model_folder, scenario, NODES)


@pytest.mark.parametrize("nonsense", [b"odd", b"12345678" * 1000], ids=["broken", "too many"])
def test_nonsense_is_counted_and_forgotten_and_requests_go_on(
    model_folder: Path, nonsense: bytes
) -> None:
    async def scenario(c: Cluster) -> None:
        liar, honest = c.nodes["p0"], c.nodes["p1"]
        await liar.publish(*KEYS)
        await honest.publish(*KEYS[:2])
        await await_metric(c, KNOWN, len(KEYS))
        answer = await c.complete(5, PROMPT)
        await liar.publish(raw=nonsense)
        await await_metric(c, happened("nonsense"), 1)
        known = 'pdserve_router_index_node_pages{name="p0",role="prefill"}'
        assert await c.metric(known) == 0
        assert not liar.got(ListCache), "asked at once, it could keep the router busy"
        assert (await c.complete(5, PROMPT))["choices"] == answer["choices"]
        assert len((await c.info())["nodes"]) == 4, "a node is not lost for that"
        await c.eventually(lambda: liar.got(ListCache))
        await await_metric(c, known, len(KEYS))

    in_cluster(model_folder, scenario, NODES)


def test_a_session_stays_on_its_nodes_whatever_it_asks(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        for i in range(6):
            body = {"prompt": [41 + i, 60, 70], "max_tokens": 2}
            headers = {"X-Session-Id": "one conversation"}
            status, _ = await c.post("/v1/completions", body, headers=headers)
            assert status == 200
        assert sorted(asked(node) for node in c.nodes.values()) == [0, 0, 6, 6]

    in_cluster(model_folder, scenario, NODES)
