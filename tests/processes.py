"""Routers and nodes as processes of a test's own, on ports that stay theirs over a restart.

`cluster_fixture` runs `pdserve cluster`, whose supervisor starts children again. Here nobody does:
a test ends a process, sees what becomes of the rest, and starts it again where it was.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from deploy.process import supervised_environment
from router.config import RouterConfig
from tests.integration.client import Client, client, eventually

ROOT = Path(__file__).parents[1]
LOOPBACK = "127.0.0.1"
READY_TIMEOUT_S = 90.0
END_TIMEOUT_S = 30.0
LOG_LINES_SHOWN = 40
FIXED_PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to outgoing connections: one of those could take the port of a
process that is away for a moment."""

Flags = Mapping[str, object]
PAIRS_ONLY: Flags = {
    "local_prefill_tokens": 0, "local_prefill_share": 1.0, "decode_alone": False,
}  # fmt: skip
"""Flags of a router that gives every request to a prefill and a decode node, however short it is.
Tests are of such clusters unless they say otherwise: most prompts in them are short."""

BOTH_PATHS: Flags = {name: getattr(RouterConfig(), name) for name in PAIRS_ONLY}
"""Flags of a router as it is by default: decode computes short prompts, and those it has mostly
cached."""


def free_ports(count: int) -> list[int]:
    """Ports nobody listens at, each different."""
    chance = random.SystemRandom()
    found: set[int] = set()
    while len(found) < count:
        port = chance.choice(FIXED_PORTS)
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            found.add(port)
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs: its address, and what brings a command there."""

    address: str = LOOPBACK
    command: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Resources:
    """What a process holds of the machine."""

    threads: int
    fds: int
    sockets: int
    rss_mib: float


class Member:
    """One name in the fleet, and the process that bears it at the moment."""

    def __init__(
        self, name: str, command: Sequence[str], url: str, log: Path, place: Place | None = None
    ) -> None:
        place = place or Place()
        self.name = name
        self.url = url
        """Base URL of its HTTP."""
        self._command = (*place.command, *command)
        self._environment = dict(place.environment)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it on its ports; it dies with this process whatever happens."""
        assert not self.is_alive, f"{self.name} runs already"
        environment = supervised_environment(os.environ)
        environment |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        environment |= self._environment
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, stdout=sink, stderr=sink, env=environment
            )

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing if it is gone."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """`kill -9`, stopped or not; returns when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def ended(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Its exit code once it has ended by itself; fails when it does not."""

        async def gone() -> bool:
            return not self.is_alive

        async def explain() -> str:
            return f"{self.name} did not end; its log ends with\n{self.log_end()}"

        await eventually(gone, timeout_s, explain)
        assert self._process is not None
        assert self._process.returncode is not None
        return self._process.returncode

    def resources(self) -> Resources:
        process = psutil.Process(self.pid)
        with process.oneshot():
            return Resources(
                threads=process.num_threads(),
                fds=process.num_fds(),
                sockets=len(process.net_connections("inet")),
                rss_mib=process.memory_info().rss / 2**20,
            )

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def log_end(self) -> str:
        """The last lines, without the one for each request."""
        lines = [line for line in self.log().splitlines() if '"request_end"' not in line]
        return "\n".join(f"  {line}" for line in lines[-LOG_LINES_SHOWN:])


class Fleet:
    """All members by name: `router-0`, `prefill-0`, `decode-0` and so on."""

    def __init__(
        self, members: Sequence[Member], node_ports: Sequence[int] = (), key: str | None = None
    ) -> None:
        """`key` opens the HTTP of members that are not on the loopback."""
        self.members = {member.name: member for member in members}
        self.node_ports = node_ports
        """Of the routers, in order: what nodes dial."""
        self.key = key

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    @property
    def routers(self) -> list[Member]:
        return [member for member in self.members.values() if member.role == "router"]

    @property
    def nodes(self) -> list[Member]:
        return [member for member in self.members.values() if member.role != "router"]

    @property
    def url(self) -> str:
        """The first router's."""
        return self.routers[0].url

    @property
    def urls(self) -> list[str]:
        """Every router's."""
        return [router.url for router in self.routers]

    def start(self) -> None:
        for member in self.members.values():
            member.start()

    def close(self) -> None:
        """End everybody, at once and whatever state they are in."""
        for member in self.members.values():
            member.kill()

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{m.log_end()}" for name, m in self.members.items())

    async def ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until every router knows exactly the processes that run now, and can use all of them."""
        for router in self.routers:
            async with client(router.url, key=self.key) as session:

                async def explain(session: Client = session) -> str:
                    known = await _joined(session)
                    return f"wanted {self._pids()}, joined {known}\n{self.logs()}"

                async def complete(session: Client = session) -> bool:
                    return await _joined(session) == self._pids()

                await eventually(complete, timeout_s, explain)

    def _pids(self) -> dict[str, int]:
        return {node.name: node.pid for node in self.nodes}


async def _joined(session: Client) -> dict[str, int] | None:
    """Names and process ids of the nodes that a router can use; None if it does not answer."""
    try:
        nodes = await session.nodes()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
    if any(node["state"] != "ready" or not node["equipped"] for node in nodes):
        return None
    return {node["name"]: node["pid"] for node in nodes}


# ---------------------------------------------------------------- making one


def plan_fleet(
    model: Path,
    folder: Path,
    *,
    prefill: int,
    decode: int,
    routers: int = 1,
    node_flags: Flags | None = None,
    prefill_flags: Flags | None = None,
    decode_flags: Flags | None = None,
    router_flags: Flags | None = None,
    own_flags: Mapping[str, Flags] | None = None,
    prefill_module: str = "prefill_node",
    places: Mapping[str, Place] | None = None,
    join: Sequence[str] | None = None,
    key: str | None = None,
) -> Fleet:
    """Command lines with fixed ports for everybody; logs go to `folder`. Nothing is started.

    `own_flags`: of the members named, beside those of their kind. `places`: where the members named
    run, on this host if not named. `join`: the addresses that nodes dial, the routers' own if not
    given. `key`: see `Fleet`.
    """
    places, own = places or {}, own_flags or {}
    ports = iter(free_ports(2 * (routers + prefill) + decode))
    members = []
    addresses = []
    node_ports = []
    for number in range(routers):
        port, node_port = next(ports), next(ports)
        node_ports.append(node_port)
        place = places.get(f"router-{number}", Place())
        addresses.append(f"tcp://{place.address}:{node_port}")
        flags = {"port": port, "node_port": node_port, "served_model_name": "tiny"}
        given = {"model": model, **flags, "node_host": place.address}
        given |= {**PAIRS_ONLY, **(router_flags or {})}
        given |= own.get(f"router-{number}", {})
        members.append(_member(f"router-{number}", "router", port, given, folder, place))
    common: dict[str, object] = {"model": model, "dtype": "float32", "threads": 1}
    common |= {"served_model_name": "tiny", **(node_flags or {})}
    joining = [part for address in join or addresses for part in ("--router", address)]
    for number in range(prefill):
        port, side = next(ports), next(ports)
        given = {**common, "port": port, "side_channel_port": side, **(prefill_flags or {})}
        name = f"prefill-{number}"
        given |= own.get(name, {})
        place = places.get(name, Place())
        members.append(_member(name, prefill_module, port, given, folder, place, joining))
    for number in range(decode):
        port = next(ports)
        given = {**common, "port": port, **(decode_flags or {})}
        name = f"decode-{number}"
        given |= own.get(name, {})
        place = places.get(name, Place())
        members.append(_member(name, "decode_node", port, given, folder, place, joining))
    return Fleet(members, node_ports, key)


def _member(
    name: str,
    module: str,
    port: int,
    flags: Flags,
    folder: Path,
    place: Place,
    more: Sequence[str] = (),
) -> Member:
    command = [sys.executable, "-m", module, *more, "--host", place.address]
    if module != "router":
        command += ["--name", name]
    command += command_line(flags)
    return Member(name, command, f"http://{place.address}:{port}", folder / f"{name}.log", place)


def command_line(flags: Flags) -> list[str]:
    """As a command takes them; a boolean is `--name` or `--no-name`, None is left out."""
    parts = []
    for flag, value in flags.items():
        spelled = flag.replace("_", "-")
        if isinstance(value, bool):
            parts.append(f"--{spelled}" if value else f"--no-{spelled}")
        elif value is not None:
            parts.append(f"--{spelled}={value}")
    return parts


@contextlib.contextmanager
def fleet(
    model: Path, **plan: int | Flags | Mapping[str, Flags] | Mapping[str, Place] | Sequence[str]
) -> Iterator[Fleet]:
    """A started fleet, ready for requests, ended afterwards; a failure shows everybody's log.

    `plan` is `plan_fleet`'s.
    """
    with tempfile.TemporaryDirectory(prefix="pdserve-fleet-") as folder:
        made = plan_fleet(model, Path(folder), **plan)  # type: ignore[arg-type]
        try:
            made.start()
            asyncio.run(made.ready())
            yield made
        except BaseException as error:
            error.add_note(made.logs())
            raise
        finally:
            made.close()


@contextlib.asynccontextmanager
async def showing_logs(made: Fleet) -> AsyncIterator[None]:
    """Adds everybody's log to a failure in a test that shares a fleet with others."""
    try:
        yield
    except BaseException as error:
        error.add_note(made.logs())
        raise
