"""Router addresses: parsing, DNS expansion, and the address this node is reached at."""

import asyncio
import ipaddress
import logging
import socket
from dataclasses import dataclass

log = logging.getLogger(__name__)

WILDCARDS = frozenset({"", "*", "0.0.0.0", "::"})


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        """From tcp://host:port. Raises ValueError naming what is wrong."""
        host, colon, port = url.removeprefix("tcp://").rpartition(":")
        if not url.startswith("tcp://") or not colon or not host or not port.isdecimal():
            raise ValueError(f"an address must look like tcp://host:port, not {url!r}")
        if not 0 < int(port) < 65536:
            raise ValueError(f"{url!r}: {port} is not a port")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    @property
    def is_literal(self) -> bool:
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host

    def __str__(self) -> str:
        return f"tcp://{bracketed(self.host)}:{self.port}"


def bracketed(host: str) -> str:
    """An IPv6 literal as URLs want it; anything else unchanged."""
    return f"[{host}]" if ":" in host else host


async def expand(endpoint: Endpoint) -> frozenset[Endpoint]:
    """All addresses behind a name; empty if it does not resolve now.

    IPv4 where there is any, so that `localhost` is one router and not two.
    """
    if endpoint.is_literal:
        return frozenset({endpoint})
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError) as error:
        log.warning("router %s does not resolve: %s", endpoint.host, error)
        return frozenset()
    ipv4 = [info for info in found if info[0] == socket.AF_INET]
    return frozenset(Endpoint(str(info[4][0]), endpoint.port) for info in ipv4 or found)


def bind_host(host: str) -> str:
    """The literal that sockets bind to: ZMQ does not resolve names. Raises OSError."""
    if host in WILDCARDS:
        return "::" if host == "::" else "0.0.0.0"
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def advertised_host(host: str, routers: tuple[Endpoint, ...]) -> str:
    """What others should dial: `host`, or for a wildcard the address that routes to a router."""
    if host not in WILDCARDS:
        return host
    for router in routers:
        family = socket.AF_INET6 if router.is_ipv6 else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((router.host, router.port))  # sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return socket.gethostname()
