"""The adapters of a stand-in node: verbs are done one after the other, as they came."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from common.messages import (
    AdapterInfo,
    AdminReply,
    LoadAdapter,
    NodeAdapters,
    ToRouter,
    UnloadAdapter,
)

Verb = LoadAdapter | UnloadAdapter


class AdapterShelf:
    """What a node can serve. `disk`: path of an adapter to the digest of its content."""

    def __init__(
        self, send: Callable[[ToRouter], Awaitable[None]], disk: Mapping[str, str]
    ) -> None:
        self._send = send
        self._disk = disk
        self.infos: dict[str, AdapterInfo] = {}
        self._verbs: asyncio.Queue[tuple[int, Verb]] = asyncio.Queue()
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()

    def hold(self) -> None:
        """Verbs are taken and not done before `let_go`."""
        self._may_go_on.clear()

    def let_go(self) -> None:
        self._may_go_on.set()

    @property
    def waiting(self) -> int:
        """Verbs that were asked for and are not begun."""
        return self._verbs.qsize()

    def holds(self) -> dict[str, str]:
        """Name to digest."""
        return {name: info.digest for name, info in self.infos.items()}

    def put(self, name: str, digest: str, path: str = "/own") -> None:
        """It is there; nobody is told."""
        self.infos[name] = AdapterInfo(name=name, digest=digest, path=path, rank=8)

    async def add(self, name: str, digest: str) -> None:
        """A load by the node's own HTTP."""
        self.put(name, digest)
        await self.tell()

    async def drop(self, name: str) -> None:
        """An unload by the node's own HTTP."""
        del self.infos[name]
        await self.tell()

    async def tell(self) -> None:
        """List all to the router."""
        await self._send(NodeAdapters(list(self.infos.values())))

    def ask(self, ticket: int, verb: Verb) -> None:
        self._verbs.put_nowait((ticket, verb))

    async def serve(self) -> None:
        while True:
            await self._may_go_on.wait()
            ticket, verb = await self._verbs.get()
            await self._may_go_on.wait()
            match verb:
                case LoadAdapter():
                    reply = self._load(ticket, verb)
                case UnloadAdapter(name):
                    reply = self._unload(ticket, name)
            await self.tell()
            await self._send(reply)

    def _load(self, ticket: int, verb: LoadAdapter) -> AdminReply:
        name, digest, held = verb.name, self._disk.get(verb.path), self.holds().get(verb.name)
        if held is not None and held != verb.digest:
            return _no(ticket, f"adapter {name!r} is already loaded")
        if digest is None:
            return _no(ticket, f"adapter {name!r} is incompatible: nothing at {verb.path}")
        if verb.digest not in ("", digest):
            return _no(ticket, f"adapter {name!r} is incompatible: other content at {verb.path}")
        self.infos[name] = AdapterInfo(
            name=name, digest=digest, path=verb.path, rank=8, pinned=verb.pinned
        )
        return AdminReply(id=ticket, ok=True, digest=digest)

    def _unload(self, ticket: int, name: str) -> AdminReply:
        if self.infos.pop(name, None) is None:
            return _no(ticket, f"adapter {name!r} was never loaded")
        return AdminReply(id=ticket, ok=True)


def _no(ticket: int, why: str) -> AdminReply:
    return AdminReply(id=ticket, ok=False, message=why)
