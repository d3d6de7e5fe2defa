"""Strangers at the router's two ports while requests run: a line, a count, nothing disturbed."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import zmq
import zmq.asyncio

from common.credentials import ClusterKeys, Secret
from common.gatekeeper import dial_with
from common.messages import Envelope, Heartbeat, NodeStats, Retracted, ToRouter, encode
from router.access import Access
from tests.integration.client import dialled
from tests.integration.router_rig import Cluster, in_cluster

KEYS = ClusterKeys.derive(Secret("a cluster secret for tests"))
GENUINE = encode(Envelope[ToRouter]("d1-1", "", 2, Heartbeat(stats=NodeStats(), step_age_s=0.0)))
MALFORMED = [
    b"", b"\xc1", b"\x00" * 100, GENUINE[:-3], GENUINE[:1], GENUINE + b"\x00",
    GENUINE.replace(b"Heartbeat", b"Heartbeam"), b"\x81\xa4body" + b"\x91" * 9000, os.urandom(3000),
]  # fmt: skip

PATIENT_S = 10.0
"""A busy machine must not make a node look silent: its replays are what is looked for."""

both = pytest.mark.parametrize("access", [Access(), Access(KEYS)], ids=["open", "curve"])
Work = Callable[[], Awaitable[None]]


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if line.startswith(word + " ")]


async def count(c: Cluster, kind: str) -> int:
    return await c.metric(f'pdserve_router_events_total{{kind="{kind}"}}', 0)


async def until(c: Cluster, kind: str, at_least: int) -> None:
    async with asyncio.timeout(30):
        while await count(c, kind) < at_least:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def stranger(c: Cluster, keys: ClusterKeys | None) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dial_with(dealer, keys)
    dealer.connect(c.node_address)
    try:
        yield dealer
    finally:
        dealer.close()
        context.term()


async def undisturbed(c: Cluster, disturb: Work) -> None:
    """Run `disturb` beside requests; each answers as if nothing had been, at its first attempt."""
    asking = [asyncio.create_task(c.complete(200)) for _ in range(4)]
    await c.eventually(lambda: len(c.nodes["d1"].rooms) == 4)
    await disturb()
    for answer in await asyncio.gather(*asking):
        assert answer["choices"][0]["text"] == c.text(200)
    async with c.session.get(f"{c.url}/metrics") as response:
        assert "pdserve_router_replayed_requests_total 0.0" in await response.text()


@both
def test_other_protocols_at_the_node_port(
    access: Access, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(c: Cluster) -> None:

        async def disturb() -> None:
            for junk in (
                b"GET / HTTP/1.1\r\n\r\n",
                b"\xff" * 64 + os.urandom(200),
                b"\x16\x03\x01",
            ):
                async with dialled(c.node_address) as (_, writer):
                    writer.write(junk)
                    await writer.drain()
            kinds = ("refused_connections", "broken_handshakes", "garbage_frames")
            async with asyncio.timeout(30):
                while not sum([await count(c, kind) for kind in kinds]):
                    await asyncio.sleep(0.02)

        await undisturbed(c, disturb)

    in_cluster(model_folder, scenario, access=access, node_timeout_s=PATIENT_S)
    assert len(lines(caplog, "refused_connections")) <= 1
    assert len(lines(caplog, "garbage_frames")) <= 1


@both
def test_malformed_messages_at_the_node_port_cost_a_line_and_no_memory(
    access: Access, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(c: Cluster) -> None:
        async def flood(dealer: zmq.asyncio.Socket, rounds: int, expected: int) -> int:
            for _ in range(rounds):
                for payload in MALFORMED:
                    await dealer.send(payload)
            await until(c, "garbage_frames", expected)
            return int(psutil.Process().memory_info().rss)

        async def disturb() -> None:
            async with stranger(c, access.keys) as dealer:
                before = await flood(dealer, 100, 100 * len(MALFORMED))
                after = await flood(dealer, 300, 400 * len(MALFORMED))
                assert after - before < 8 << 20

        await undisturbed(c, disturb)

    in_cluster(model_folder, scenario, access=access, node_timeout_s=PATIENT_S)
    assert len(lines(caplog, "garbage_frames")) == 1
    assert not [record for record in caplog.records if record.exc_info]


@both
def test_genuine_messages_that_come_again_are_stale(
    access: Access, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By another connection, by the same one, and from a node that has never been."""

    async def scenario(c: Cluster) -> None:
        node = c.nodes["d1"]
        to = node._router_incarnation

        async def disturb() -> None:
            rooms = tuple(node.rooms)
            old = [encode(Envelope[ToRouter](node.incarnation, to, 2, Retracted(r))) for r in rooms]
            unknown = encode(Envelope[ToRouter]("nobody", to, 7, Retracted(rooms[0])))
            async with stranger(c, access.keys) as dealer:
                for payload in (*old, unknown) * 20:
                    await dealer.send(payload)
                await until(c, "stale_node_messages", 20 * (len(old) + 1))
            for payload in old * 20:
                await node.send_raw(payload)
            await until(c, "stale_node_messages", 20 * (2 * len(old) + 1))

        await undisturbed(c, disturb)

    in_cluster(model_folder, scenario, access=access, node_timeout_s=PATIENT_S)
    assert len(lines(caplog, "stale_node_messages")) == 1


@both
def test_an_oversized_message_ends_its_own_connection_only(
    access: Access, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.link.MAX_MESSAGE_BYTES", 1 << 16)

    async def scenario(c: Cluster) -> None:
        async def disturb() -> None:
            async with stranger(c, access.keys) as dealer:
                await dealer.send(b"x" * (1 << 17))
                await until(c, "closed_connections", 1)

        await undisturbed(c, disturb)
        assert await count(c, "garbage_frames") == 0

    in_cluster(model_folder, scenario, access=access, node_timeout_s=PATIENT_S)


def test_a_recorded_session_cannot_be_played_back(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every byte that a node with the secret sent, by somebody who has listened on the wire."""

    async def scenario(c: Cluster) -> None:
        recorded = bytearray()

        async def pump(
            source: asyncio.StreamReader, sink: asyncio.StreamWriter, tape: bytearray | None
        ) -> None:
            while data := await source.read(1 << 16):
                if tape is not None:
                    tape += data
                sink.write(data)

        async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with dialled(c.node_address) as (up_reader, up_writer):
                down = asyncio.create_task(pump(up_reader, writer, None))
                try:
                    await pump(reader, up_writer, recorded)
                finally:
                    down.cancel()
                    writer.transport.abort()

        server = await asyncio.start_server(tap, "127.0.0.1", 0)
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dial_with(dealer, KEYS)
        dealer.connect(address)
        await dealer.send(GENUINE)
        await dealer.recv()  # "greet me": it has arrived
        assert len(recorded) > len(GENUINE)
        assert b"Heartbeat" not in recorded, "nothing can be read on the wire"
        stale = await count(c, "stale_node_messages")

        async def disturb() -> None:
            for _ in range(3):
                async with dialled(c.node_address) as (_, writer):
                    writer.write(bytes(recorded))
                    await writer.drain()
                    await until(c, "refused_connections", 1)
            assert await count(c, "stale_node_messages") == stale

        await undisturbed(c, disturb)
        # A connection that is gone before it could be asked for its address is told of later.
        await c.eventually(lambda: lines(caplog, "refused_connections"))
        dealer.close()
        context.term()
        server.close()
        await server.wait_closed()

    in_cluster(model_folder, scenario, access=Access(KEYS), node_timeout_s=PATIENT_S)
    assert len(lines(caplog, "refused_connections")) == 1


def test_bad_bytes_at_the_http_port(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(c: Cluster) -> None:
        bodies = [b"", b"{", b"\xff\xfe", b"[" * 50_000, b"[1, 2]", b'{"prompt": {"a": 1}}']
        requests = [
            b"\x00\xff\x80\r\n\r\n",
            b"GET \xff\x00 x\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /generate HTTP/1.1\r\n" * 3,
        ]
        requests += [b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"y" * 20_000 + b"\r\n\r\n"]

        async def disturb() -> None:
            for request in requests:
                async with dialled(c.url) as (_, writer):
                    writer.write(request)
                    await writer.drain()
            for body in bodies:
                url = f"{c.url}/v1/completions"
                async with c.session.post(url, data=body) as response:
                    assert response.status == 400
                    assert (await response.json())["error"]["message"]
            await until(c, "garbage_http", 1)

        await undisturbed(c, disturb)

    in_cluster(model_folder, scenario, node_timeout_s=PATIENT_S)
    assert len(lines(caplog, "garbage_http")) == 1
    assert not [record for record in caplog.records if record.exc_info]
