"""One prefill and one decode node behind a `WireProxy`, and how to make any message appear.

`TRIGGERS` says for each message type of each direction what makes it be sent. A trigger is called
again and again until its message has come by; whatever it does, it puts right again.
"""

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from common import messages as wire
from common.messages import Envelope, PeerHello, PeerMemory, encode
from common.modes import DisaggregationMode
from tests.integration.client import Client, Refused, client, eventually, is_idle
from tests.integration.oracle import Oracle, random_prompt
from tests.processes import LOOPBACK, Fleet, free_ports, plan_fleet
from tests.standin import FINGERPRINT, StandIn
from tests.tiny_models import MAX_POSITIONS, make_tiny_model
from tests.wire_proxy import Action, Direction, Strike, WireProxy

HEARTBEAT_S, SILENCE_S, SYNC_S = 0.2, 1.0, 2.0
DELAY_S = 1.5 * SILENCE_S
OCCURS_WITHIN_S = 30.0
ROUTER_FLAGS = {
    "heartbeat_s": HEARTBEAT_S, "node_timeout_s": SILENCE_S, "admin_timeout_s": 1.0,
    "max_replays_after_death": 50, "max_replays_after_fault": 50, "node_wait_s": 100.0,
}  # fmt: skip
NODE_FLAGS = {
    "heartbeat_s": HEARTBEAT_S, "peer_timeout_s": SILENCE_S, "router_timeout_s": SILENCE_S,
    "lease_s": 1.5, "longest_post_s": 0.5, "twin_timeout_s": 4.0, "num_pages": 200,
    "chunk_size": 16,
}  # fmt: skip
"""Small chunks, so that a long prompt is between its first and its last one for a while."""

UNIONS = {
    Direction.TO_NODE: wire.ToNode,
    Direction.TO_ROUTER: wire.ToRouter,
    Direction.TO_PREFILL: wire.ToPrefill,
    Direction.TO_DECODE: wire.ToDecode,
}
Cell = tuple[Direction, type]
CELLS: list[Cell] = [(way, kind) for way, union in UNIONS.items() for kind in get_args(union)]


class WireRig:
    """The processes, the proxy between them, and a client."""

    def __init__(self, fleet: Fleet, proxy: WireProxy, session: Client, folder: Path) -> None:
        chance = random.Random(7)
        self.fleet = fleet
        self.proxy = proxy
        self.session = session
        self.oracle = Oracle(folder)
        self.chance = chance
        self.short = [random_prompt(chance, length) for length in (5, 40, 100)]
        self.streams: list[tuple[list[int], int, asyncio.Task[list[int]]]] = []
        self._serial = 0

    def ask(self, prompt: list[int], count: int) -> None:
        """A stream whose text `settle` will judge."""
        self.streams.append((prompt, count, asyncio.create_task(self._stream(prompt, count))))

    async def _stream(self, prompt: list[int], count: int) -> list[int]:
        """A link that is just being made again is a 503 to who comes anew, and asked once more."""
        while True:
            try:
                return await self.session.stream(prompt, count)
            except Refused as refusal:
                if refusal.status != 503:
                    raise
            await asyncio.sleep(HEARTBEAT_S)

    async def strike(self, cell: Cell, action: Action) -> None:
        """Have one message lost, repeated or late, under streams that must not notice."""
        strike = self.proxy.strike(*cell, action, DELAY_S)
        for prompt in self.short:
            self.ask(prompt, 80)
        async with asyncio.timeout(OCCURS_WITHIN_S):
            while not await happened(strike, within_s=0.3):
                await TRIGGERS[cell](self)
        self.ask(self.short[0], 80)
        await strike.over.wait()
        await self.settle()

    async def settle(self) -> None:
        """Every text is right, every page is at home, nobody died but whom a trigger ended."""
        for member in self.fleet.members.values():
            if not member.is_alive:
                assert member.name == "prefill-0", f"{member.name} has died"
                member.start()
                await self.fleet.ready()
        streams, self.streams = self.streams, []
        answers = await asyncio.gather(*(task for _, _, task in streams))
        for (prompt, count, _), answer in zip(streams, answers, strict=True):
            assert answer == self.oracle.answer(prompt, count)
        await eventually(self._home, 30.0, self._infos)
        assert all(member.is_alive for member in self.fleet.members.values())

    async def _home(self) -> bool:
        """Asked of the nodes themselves: the router does not know at once that a link broke."""
        infos = await self._infos()
        if not all(is_idle(info["stats"]) for info in infos):
            return False
        return all(info["peers"] and all(info["routers"].values()) for info in infos)

    async def _infos(self) -> list[dict[str, Any]]:
        return [await self.session.node_info({"url": node.url}) for node in self.fleet.nodes]

    # ------------------------------------------------------------ what triggers do

    def long(self) -> list[int]:
        """A prompt that takes a while to compute: nothing of it is cached."""
        return random_prompt(self.chance, MAX_POSITIONS - 112)

    async def more(self) -> None:
        self.ask(self.short[0], 20)

    async def something_new(self) -> None:
        """Its pages are news for the router's index."""
        self.ask(random_prompt(self.chance, 40), 20)

    async def one_token(self) -> None:
        self.ask(self.long(), 1)

    async def abandon(self) -> None:
        """A client that leaves at some moment, mostly while its KV is under way."""
        task = asyncio.create_task(self.session.stream(self.long(), 100))
        await asyncio.sleep(self.chance.uniform(0.02, 0.4))
        await ended(task)

    async def abort_on_prefill(self) -> None:
        """The node's own HTTP ends a request that is between two chunks."""
        self._serial += 1
        rid = f"doomed-{self._serial}"
        task = asyncio.create_task(self.session.stream(self.long(), 100, rid=rid))
        await asyncio.sleep(self.chance.uniform(0.02, 0.4))
        async with client(self.fleet["prefill-0"].url) as node:
            await node.post("/abort_request", {"rid": rid})
        await ended(task)

    async def pause(self) -> None:
        """While something runs, and everybody gives up what they hold."""
        self.ask(self.short[0], 80)
        await asyncio.sleep(self.chance.uniform(0.05, 0.2))
        await self.session.post("/pause_generation", {"mode": "retract"})
        await self.go_on()

    async def go_on(self) -> None:
        """An answer that was lost is asked for once more, as an operator would."""
        while (await self.session.post("/continue_generation"))[0] != 200:
            await asyncio.sleep(HEARTBEAT_S)

    async def hold_up_prefill(self) -> None:
        """Transfers stay open for longer than decode waits before it asks about them."""
        async with client(self.fleet["prefill-0"].url) as node:
            self.ask(self.long(), 4)  # first: the router gives a paused node no work
            await asyncio.sleep(self.chance.uniform(0.0, 0.05))
            await node.post("/pause_generation", {"mode": "in_place"})
            await asyncio.sleep(SYNC_S + 2 * HEARTBEAT_S)
            await node.post("/continue_generation")

    async def lose_destination(self) -> None:
        self.proxy.strike(Direction.TO_PREFILL, wire.Destination, Action.DROP, 0.0)
        await self.hold_up_prefill()

    async def cut_router_links(self) -> None:
        self.proxy.cut(router_links=True)
        await asyncio.sleep(HEARTBEAT_S)

    async def silence_prefill(self) -> None:
        """Prefill does not reach the router for so long that it is given up."""
        with self.proxy.mute(
            lambda way, e: way is Direction.TO_ROUTER and e.source.startswith("prefill")
        ):
            await asyncio.sleep(1.5 * SILENCE_S)

    async def silence_side_channel(self) -> None:
        """The nodes do not reach each other for so long that both give the other up."""
        with self.proxy.mute(lambda way, _: way in (Direction.TO_PREFILL, Direction.TO_DECODE)):
            await self.more()
            await asyncio.sleep(1.5 * SILENCE_S)
        await self.more()

    async def end_prefill(self) -> None:
        """SIGTERM: it says goodbye to everybody; `settle` starts another in its place."""
        self.fleet["prefill-0"].signal(signal.SIGTERM)
        assert await self.fleet["prefill-0"].ended() == 0

    async def guest_leaves(self) -> None:
        """A node that fits nobody joins and says goodbye."""
        async with self._guest(FINGERPRINT) as guest:
            await guest.joined.wait()
            await guest.say_goodbye()

    async def guest_loses_news(self) -> None:
        """The router misses an update of its cache, and asks for all of it."""
        async with self._guest(FINGERPRINT) as guest:
            await guest.joined.wait()
            guest.lose_update()
            await guest.publish(1, 2, 3)
            await asyncio.sleep(HEARTBEAT_S)

    async def guest_is_refused(self) -> None:
        """A node of another wire version asks to join, until it has been told no."""
        async with self._guest(msgspec.structs.replace(FINGERPRINT, wire_version=0)):
            await asyncio.sleep(HEARTBEAT_S)

    @asynccontextmanager
    async def _guest(self, fingerprint: wire.Fingerprint) -> AsyncIterator[StandIn]:
        guest = StandIn(DisaggregationMode.DECODE, self.proxy.address, fingerprint=fingerprint)
        joining = asyncio.create_task(guest.__aenter__())
        try:
            yield guest
        finally:
            await ended(joining)
            await guest.die()

    async def stranger_dials_prefill(self) -> None:
        """A decode node of another model shakes hands, and is refused."""
        info = await self.session.node_info({"url": self.fleet["prefill-0"].url})
        memory = PeerMemory(
            agent_name="stranger",
            metadata=b"",
            base_address=0,
            num_pages=1,
            page_bytes=1,
            first_head=0,
            num_heads=1,
        )
        hello = PeerHello(fingerprint=FINGERPRINT, memories=(memory,), lease_s=1.0)
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        try:
            dealer.connect(self.proxy.side_channel)
            await dealer.send(encode(Envelope("stranger", info["incarnation"], 1, hello)))
            await asyncio.sleep(HEARTBEAT_S)
        finally:
            dealer.close(0)
            context.term()


Trigger = Callable[[WireRig], Awaitable[None]]

TRIGGERS: dict[Cell, Trigger] = {
    (Direction.TO_NODE, wire.Welcome): WireRig.cut_router_links,
    (Direction.TO_NODE, wire.Refused): WireRig.guest_is_refused,
    (Direction.TO_NODE, wire.Generate): WireRig.more,
    (Direction.TO_NODE, wire.Abort): WireRig.abandon,
    (Direction.TO_NODE, wire.PeerGone): WireRig.silence_prefill,
    (Direction.TO_NODE, wire.Peers): WireRig.cut_router_links,
    (Direction.TO_NODE, wire.ListCache): WireRig.guest_loses_news,
    (Direction.TO_NODE, wire.Ping): WireRig.more,
    (Direction.TO_NODE, wire.Admin): WireRig.pause,
    (Direction.TO_ROUTER, wire.Hello): WireRig.cut_router_links,
    (Direction.TO_ROUTER, wire.Heartbeat): WireRig.more,
    (Direction.TO_ROUTER, wire.Tokens): WireRig.more,
    (Direction.TO_ROUTER, wire.Retracted): WireRig.pause,
    (Direction.TO_ROUTER, wire.Failed): WireRig.silence_side_channel,
    (Direction.TO_ROUTER, wire.Aborted): WireRig.abort_on_prefill,
    (Direction.TO_ROUTER, wire.AdminReply): WireRig.pause,
    (Direction.TO_ROUTER, wire.NodeAdapters): WireRig.cut_router_links,
    (Direction.TO_ROUTER, wire.CacheUpdate): WireRig.something_new,
    (Direction.TO_ROUTER, wire.Goodbye): WireRig.guest_leaves,
    (Direction.TO_PREFILL, wire.PeerHello): WireRig.silence_side_channel,
    (Direction.TO_PREFILL, wire.Destination): WireRig.more,
    (Direction.TO_PREFILL, wire.Cancel): WireRig.abandon,
    (Direction.TO_PREFILL, wire.Sync): WireRig.hold_up_prefill,
    (Direction.TO_PREFILL, wire.Pong): WireRig.more,
    (Direction.TO_PREFILL, wire.PeerBye): WireRig.silence_prefill,
    (Direction.TO_DECODE, wire.PeerWelcome): WireRig.silence_side_channel,
    (Direction.TO_DECODE, wire.PeerRefused): WireRig.stranger_dials_prefill,
    (Direction.TO_DECODE, wire.RoomUnknown): WireRig.lose_destination,
    (Direction.TO_DECODE, wire.RoomFinished): WireRig.one_token,
    (Direction.TO_DECODE, wire.RoomFailed): WireRig.abort_on_prefill,
    (Direction.TO_DECODE, wire.Drained): WireRig.abandon,
    (Direction.TO_DECODE, wire.Ping): WireRig.more,
    (Direction.TO_DECODE, wire.PeerBye): WireRig.end_prefill,
}


async def happened(strike: Strike, within_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(strike.done.wait(), within_s)
    return strike.done.is_set()


async def ended(
    task: "asyncio.Task[object] | asyncio.Task[list[int]] | asyncio.Task[StandIn]",
) -> None:
    """Leave a request, or a guest, in the middle; how it ended by then is its own affair."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, AssertionError, aiohttp.ClientError):
        await task


@asynccontextmanager
async def wire_rig(folder: Path) -> AsyncIterator[WireRig]:
    """A cluster behind a proxy, ready. `folder` takes the model and the logs."""
    model = make_tiny_model("llama", folder / "llama")
    (port,) = free_ports(1)
    join = [f"tcp://{LOOPBACK}:{port}"]
    fleet = plan_fleet(
        model,
        folder,
        prefill=1,
        decode=1,
        router_flags=ROUTER_FLAGS,
        node_flags=NODE_FLAGS,
        join=join,
    )
    proxy = WireProxy(fleet.node_ports[0], port)
    await proxy.start()
    try:
        fleet.start()
        await fleet.ready()
        async with client(fleet.url) as session:
            yield WireRig(fleet, proxy, session, model)
    finally:
        fleet.close()
        await proxy.close()
