"""Who may ask the router: API keys, admin keys, and the cluster's secret at the node port."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from aiohttp import web

from common.credentials import ClusterKeys, KeyRing, Secret
from common.messages import Generate, Heartbeat, NodeStats
from deploy.endpoint import Endpoint, EndpointError
from router.access import ADMIN_PATHS, OPEN_PATHS, Access
from tests.integration.client import dialled
from tests.integration.router_rig import DECODE, IDS, PREFILL, Cluster, in_cluster
from tests.standin import FINGERPRINT, StandIn

KEY, ADMIN = "the-key-of-a-client", "the-key-of-an-admin"
CLIENTS = Access(api=KeyRing([Secret(KEY), Secret("another-clients-key")]))
BOTH = Access(api=KeyRing([Secret(KEY)]), admin=KeyRing([Secret(ADMIN)]))
OURS, THEIRS = (ClusterKeys.derive(Secret(f"{whose} cluster secret")) for whose in ("our", "their"))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(c: Cluster, method: str, path: str, key: str | None = None) -> tuple[int, str]:
    headers = {} if key is None else bearer(key)
    async with c.session.request(method, c.url + path, headers=headers) as response:
        return response.status, await response.text()


# ---------------------------------------------------------------- keys


def test_without_a_key_nothing_is_answered_but_probes(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        for path in ("/health", "/health_generate", "/live", "/metrics"):
            assert (await ask(c, "GET", path))[0] == 200, path
        closed = [("POST", path) for path in (*ADMIN_PATHS, "/v1/completions", "/generate")]
        closed += [("GET", path) for path in ("/v1/models", "/get_server_info", "/nowhere")]
        for method, path in closed:
            for key in (None, "wrong", KEY[:-1], KEY + "x"):
                status, text = await ask(c, method, path, key)
                assert status == 401, path
                assert '"code":"invalid_api_key"' in text
                assert '"type":"authentication_error"' in text
        for key in (KEY, "another-clients-key"):
            assert (await ask(c, "GET", "/v1/models", key))[0] == 200
            assert (await ask(c, "POST", "/flush_cache", key))[0] == 200
            assert (await ask(c, "GET", "/nowhere", key))[0] == 404

    in_cluster(model_folder, scenario, access=CLIENTS)


def test_a_refusal_names_the_scheme_and_reads_nothing_of_the_body(model_folder: Path) -> None:
    """The answer comes although most of the announced body has not been sent."""

    async def scenario(c: Cluster) -> None:
        async with dialled(c.url) as (reader, writer):
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 1000000\r\n\r\n{"
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("HTTP/1.1 401 ")
        assert "WWW-Authenticate: Bearer\r\n" in head
        assert not c.nodes["p0"].rooms

    in_cluster(model_folder, scenario, access=CLIENTS)


def test_the_openai_client_with_a_key(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        url = f"{c.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            answer = await client.completions.create(model="tiny", prompt=IDS, max_tokens=5)
            assert answer.choices[0].text == c.text(5)
        async with openai.AsyncOpenAI(base_url=url, api_key="nobody's", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.models.list()
            assert caught.value.code == "invalid_api_key"
            assert "nobody's" not in str(caught.value)

    in_cluster(model_folder, scenario, access=CLIENTS)


def test_our_own_client_shows_its_key(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        async with Endpoint(c.url, Secret(KEY)) as endpoint:
            assert len(await endpoint.nodes()) == 2
            assert await endpoint.first_model() == "tiny"
        async with Endpoint(c.url) as endpoint:
            assert await endpoint.nodes() == []
            with pytest.raises(EndpointError, match="401: give an API key of this server"):
                await endpoint.first_model()

    in_cluster(model_folder, scenario, access=CLIENTS)


def test_admin_verbs_want_an_admin_key_where_there_is_one(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        for path in sorted(ADMIN_PATHS - {"/drain"}):
            assert (await ask(c, "POST", path))[0] == 401
            status, text = await ask(c, "POST", path, KEY)
            assert (status, '"admin_key_required"' in text) == (403, True)
        assert (await ask(c, "POST", "/flush_cache", ADMIN))[0] == 200
        assert (await ask(c, "GET", "/v1/models", ADMIN))[0] == 200
        assert (await ask(c, "GET", "/v1/models", KEY))[0] == 200

    in_cluster(model_folder, scenario, access=BOTH)


def test_an_admin_key_alone_leaves_the_rest_open(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        assert (await ask(c, "GET", "/v1/models"))[0] == 200
        assert (await ask(c, "POST", "/flush_cache"))[0] == 401
        assert (await ask(c, "POST", "/flush_cache", ADMIN))[0] == 200

    in_cluster(model_folder, scenario, access=Access(admin=BOTH.admin))


USERS = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"}
)


def test_every_verb_is_somebodys(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb that somebody adds is not silently everybody's."""
    applications: list[web.Application] = []
    runner = web.AppRunner

    def spy(app: web.Application, **kwargs: Any) -> web.AppRunner:
        applications.append(app)
        return runner(app, **kwargs)

    monkeypatch.setattr("router.app.web.AppRunner", spy)

    async def scenario(_: Cluster) -> None:
        pass

    in_cluster(model_folder, scenario)
    (app,) = applications
    verbs = {
        route.resource.canonical
        for route in app.router.routes()
        if route.method == "POST" and route.resource is not None
    }
    assert verbs <= USERS | ADMIN_PATHS
    assert not OPEN_PATHS & verbs


# ---------------------------------------------------------------- the cluster's secret


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if message.startswith("refused_connections")]


@pytest.mark.parametrize(
    ("router", "node", "why"),
    [
        (OURS, THEIRS, "another cluster secret"),
        (OURS, None, "no cluster secret"),
        (None, OURS, "a cluster secret"),
    ],
)
def test_who_has_not_the_secret_is_refused_with_one_line(
    router: ClusterKeys | None,
    node: ClusterKeys | None,
    why: str,
    model_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(c: Cluster) -> None:
        asking = asyncio.create_task(c.complete(40))
        while not refusals(caplog):
            stranger = StandIn(PREFILL, c.node_address, "stranger", keys=node)
            stranger._socket.connect(c.node_address)
            await asyncio.sleep(0.3)  # some of them try again, which makes no second line
            await stranger.die()
        answer = await asking
        assert answer["choices"][0]["text"] == c.text(40)
        assert [node["name"] for node in (await c.info())["nodes"]] == ["p0", "d1"]
        text = (await ask(c, "GET", "/metrics"))[1]
        assert 'pdserve_router_events_total{kind="refused_connections"}' in text

    in_cluster(model_folder, scenario, access=Access(router))
    (line,) = refusals(caplog)
    assert "from 127.0.0.1:" in line or "from an unknown address" in line  # it was quicker
    assert why in line or "broke the handshake off" in line


def test_with_the_secret_everything_works_and_a_restarted_node_is_let_in(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(c: Cluster) -> None:
        assert (await c.complete(20))["choices"][0]["text"] == c.text(20)
        await c.nodes["d1"].die()
        async with StandIn(DECODE, c.node_address, "d1", keys=OURS):
            assert (await c.complete(20))["choices"][0]["text"] == c.text(20)

    in_cluster(model_folder, scenario, access=Access(OURS))
    assert not refusals(caplog)


# ---------------------------------------------------------------- names


def test_a_second_node_of_a_name_is_told_so_and_gets_in_when_the_first_leaves(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(c: Cluster) -> None:
        twin = StandIn(DECODE, c.node_address, "d1")
        twin._socket.connect(c.node_address)
        listening = asyncio.create_task(twin._receive())
        for _ in range(3):
            await twin.greet()
        await c.eventually(lambda: len(twin.refusals) == 3)
        assert "the name d1 belongs to a live node" in twin.refusals[0]
        assert (await c.complete(20))["choices"][0]["text"] == c.text(20)
        await c.nodes["d1"].say_goodbye()
        async with asyncio.timeout(30):  # the two connections keep no order between them
            while len((await c.info())["nodes"]) > 1:
                await asyncio.sleep(0.01)
        await twin.greet()
        await asyncio.wait_for(twin.joined.wait(), 30)
        listening.cancel()
        await twin.die()

    in_cluster(model_folder, scenario)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("refused_nodes")]
    assert len(lines) == 1
    assert "d1 (d1-" in lines[0]


def test_a_restarted_node_takes_its_place_at_once(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(c: Cluster) -> None:
        before = c.nodes["d1"]
        await before.die()
        async with StandIn(DECODE, c.node_address, "d1") as after:
            assert (await c.complete(20))["choices"][0]["text"] == c.text(20)
            names = {node["name"]: node["incarnation"] for node in (await c.info())["nodes"]}
            assert names["d1"] == after.incarnation != before.incarnation

    caplog.set_level(logging.INFO)
    in_cluster(model_folder, scenario, node_timeout_s=60.0)
    assert not any("refused_nodes" in record.getMessage() for record in caplog.records)


def test_a_stopped_node_that_lost_its_name_is_refused_when_it_wakes(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        sleeper = c.nodes["d1"]
        sleeper.mute()
        await asyncio.sleep(0.5)
        async with StandIn(DECODE, c.node_address, "d1") as heir:
            sleeper.unmute()
            await sleeper._send(Heartbeat(stats=NodeStats(), step_age_s=0.0))
            await c.eventually(lambda: sleeper.refusals)
            names = {node["name"]: node["incarnation"] for node in (await c.info())["nodes"]}
            assert names["d1"] == heir.incarnation
            assert (await c.complete(20))["choices"][0]["text"] == c.text(20)

    in_cluster(model_folder, scenario, node_timeout_s=0.8)


def test_nodes_that_do_not_fit_are_named_with_the_field_in_one_line(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(c: Cluster) -> None:
        other = msgspec.structs.replace(FINGERPRINT, page_size=32)
        async with StandIn(DECODE, c.node_address, "d2", fingerprint=other) as odd:
            for _ in range(3):
                await odd.greet()
            assert (await c.complete(20))["choices"][0]["text"] == c.text(20)
            assert (await c.info())["mismatches"] == ["p0 and d2 differ in page_size"]
            assert not odd.got(Generate)

    in_cluster(model_folder, scenario)
    said = [record.getMessage() for record in caplog.records]
    (line,) = [text for text in said if text.startswith("mismatched_pairs")]
    assert "p0 and d2 differ in page_size" in line
