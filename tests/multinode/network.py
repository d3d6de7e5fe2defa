"""Hosts with addresses of their own on one machine: network namespaces around a bridge.

    this process ── bridge 10.x.y.1 ──┬── veth ── namespace "router"    10.x.y.2
                                      ├── veth ── namespace "prefill-0" 10.x.y.3
                                      └── ...

What a test does to the network: drop everything between two hosts, in one direction or in both;
drop a share of the packets; pull a host's cable. Dropping happens where packets arrive, so a sender
never sees an error, as on a real network.

Names hold the process id of their maker: what a killed run left behind is removed by the next.
"""

import atexit
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "pds"
INTERFACE = "eth0"
FIRST_HOST = 2
SUBNETS = tuple(f"10.{203 + number // 256}.{number % 256}" for number in range(1024))
LARGE_PACKET = 600
"""Bytes: beyond this a packet carries KV, below it a side-channel message or an acknowledgement."""


class CannotMakeHosts(RuntimeError):
    """This machine, or this user, cannot make network namespaces; says what failed."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Packets that do not arrive at a host."""

    at: "Host"
    match: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace and its only address."""

    name: str
    namespace: str
    cable: str
    """The end of its veth pair that is plugged into the bridge."""
    address: str

    @property
    def command(self) -> tuple[str, ...]:
        """What to put before a command so that it runs on this host."""
        return ("ip", "netns", "exec", self.namespace)


class Network:
    """A bridge and its hosts; `close` removes all of it, with every process that runs there."""

    def __init__(self) -> None:
        """Raises CannotMakeHosts."""
        remove_stale()
        tag = f"{PREFIX}{os.getpid()}"
        self._number = next(n for n in range(100) if not _exists(f"{tag}b{n}"))
        self._tag = f"{tag}n{self._number}"
        self._bridge = f"{tag}b{self._number}"
        self._hosts: dict[str, Host] = {}
        self._rules: list[Rule] = []
        self._unplugged: set[Host] = set()
        atexit.register(self.close)
        try:
            run("iptables", "--version")
            self._subnet = self._make_bridge()
        except CannotMakeHosts:
            self.close()
            raise

    def _make_bridge(self) -> str:
        run("ip", "link", "add", self._bridge, "type", "bridge")
        taken = run("ip", "-4", "-brief", "address")
        subnet = random.choice([s for s in SUBNETS if f" {s}." not in taken])
        run("ip", "address", "add", f"{subnet}.1/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")
        return subnet

    def host(self, name: str) -> Host:
        """The host of this name, made if there is none."""
        if name in self._hosts:
            return self._hosts[name]
        number = len(self._hosts)
        host = Host(
            name,
            namespace=f"{self._tag}-{name}",
            cable=f"{self._tag}c{number}",
            address=f"{self._subnet}.{FIRST_HOST + number}",
        )
        self._hosts[name] = host
        run("ip", "netns", "add", host.namespace)
        peer = ("peer", "name", INTERFACE, "netns", host.namespace)
        run("ip", "link", "add", host.cable, "type", "veth", *peer)
        run("ip", "link", "set", host.cable, "master", self._bridge, "up")
        inside = ("ip", "-n", host.namespace)
        run(*inside, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        run(*inside, "link", "set", INTERFACE, "up")
        run(*inside, "link", "set", "lo", "up")
        return host

    # ------------------------------------------------------------ faults

    def block(self, source: Host, target: Host) -> Rule:
        """Nothing that `source` sends reaches `target`; the other direction is untouched."""
        return self._drop(target, "-s", source.address)

    def part(self, one: Host, other: Host) -> None:
        """Nothing passes between the two, in either direction."""
        self.block(one, other)
        self.block(other, one)

    def lose(self, source: Host, target: Host, share: float, *, large_only: bool = False) -> Rule:
        """Drop this share of the packets from `source` to `target`, or only of those with bulk."""
        size = ("-m", "length", "--length", f"{LARGE_PACKET}:") if large_only else ()
        chance = ("-m", "statistic", "--mode", "random", "--probability", str(share))
        return self._drop(target, "-s", source.address, *size, *chance)

    def unplug(self, host: Host) -> None:
        """Pull the cable: the host is reached by nobody and reaches nobody."""
        run("ip", "link", "set", host.cable, "down")
        self._unplugged.add(host)

    def lift(self, rule: Rule) -> None:
        """Let pass again what `block` or `lose` stopped."""
        self._rules.remove(rule)
        self._iptables("-D", rule)

    def heal(self) -> None:
        """Undo all faults."""
        for rule in tuple(self._rules):
            self.lift(rule)
        for host in self._unplugged:
            run("ip", "link", "set", host.cable, "up")
        self._unplugged.clear()

    def _drop(self, at: Host, *match: str) -> Rule:
        rule = Rule(at, match)
        self._iptables("-A", rule)
        self._rules.append(rule)
        return rule

    @staticmethod
    def _iptables(verb: str, rule: Rule) -> None:
        run(*rule.at.command, "iptables", "-w", verb, "INPUT", *rule.match, "-j", "DROP")

    def close(self) -> None:
        """Remove every host and the bridge; can be repeated."""
        atexit.unregister(self.close)
        for host in self._hosts.values():
            _remove_namespace(host.namespace)
        self._hosts.clear()
        if _exists(self._bridge):
            _try("ip", "link", "delete", self._bridge)


@contextmanager
def network() -> Iterator[Network]:
    """A network for the body. Raises CannotMakeHosts."""
    made = Network()
    try:
        yield made
    finally:
        made.close()


def remove_stale() -> None:
    """Remove what runs that were killed have left. Raises CannotMakeHosts."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise CannotMakeHosts("network namespaces need root and the command `ip`")
    for line in run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if _is_stale(name):
            _remove_namespace(name)
    for interface in sorted(path.name for path in Path("/sys/class/net").iterdir()):
        if _is_stale(interface) and _exists(interface):
            _try("ip", "link", "delete", interface)


def _is_stale(name: str) -> bool:
    digits = name.removeprefix(PREFIX)
    pid = digits[: len(digits) - len(digits.lstrip("0123456789"))]
    return name.startswith(PREFIX) and bool(pid) and not Path(f"/proc/{pid}").exists()


def _remove_namespace(name: str) -> None:
    for pid in _try("ip", "netns", "pids", name).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    _try("ip", "netns", "delete", name)


def _exists(interface: str) -> bool:
    return Path(f"/sys/class/net/{interface}").exists()


def run(*command: str) -> str:
    """The output of a command. Raises CannotMakeHosts with what it said."""
    try:
        done = _call(command)
    except FileNotFoundError:
        raise CannotMakeHosts(f"there is no command `{command[0]}`") from None
    if done.returncode:
        raise CannotMakeHosts(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _try(*command: str) -> str:
    """As `run`, but whatever fails is left as it is: for taking down what may be gone."""
    return _call(command).stdout


def _call(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
