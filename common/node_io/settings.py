"""What the I/O thread must know of its node: plain frozen values, no configuration object."""

from dataclasses import dataclass

from common.credentials import ClusterKeys, KeyRing
from common.loopback import is_loopback
from common.messages import Fingerprint, Hello, Incarnation, PeerMemory
from common.modes import DisaggregationMode


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """Who this process is; known before anything is loaded."""

    role: DisaggregationMode
    name: str
    incarnation: Incarnation
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IOSettings:
    """Where to listen, whom to join, and when silence is a loss. Times in seconds."""

    host: str = "127.0.0.1"
    """Address to bind; a wildcard is replaced by a reachable address where it is advertised."""
    port: int = 0
    """HTTP; 0 takes a free one."""
    routers: tuple[str, ...] = ()
    """tcp://host:port each; a DNS name stands for all its addresses."""
    keys: ClusterKeys | None = None
    """What the cluster secret gives; None: whoever reaches the sockets may use them."""
    heartbeat_s: float = 0.5
    router_timeout_s: float = 10.0
    peer_timeout_s: float = 5.0
    stuck_engine_s: float = 300.0
    admin_timeout_s: float = 60.0
    """Longest wait of an HTTP admin verb for the engine."""
    adapter_timeout_s: float = 600.0
    """The same for adapters: a load reads files, an unload waits for requests."""
    resolve_s: float = 30.0
    """Between two look-ups of a router's DNS name."""

    def http_keys(self) -> KeyRing:
        """Whoever reaches a loopback port is on this machine; all others must show the node key."""
        if self.keys is None or is_loopback(self.host):
            return KeyRing()
        return KeyRing([self.keys.node_key])


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a node can say of itself once model, cache and transfer are registered."""

    served_model_name: str
    fingerprint: Fingerprint
    memories: tuple[PeerMemory, ...]
    """One of each rank."""
    max_model_len: int
    max_running_requests: int
    weight_version: str = ""

    def hello(self, identity: NodeIdentity, url: str, side_channel: str) -> Hello:
        """The introduction that every router gets."""
        return Hello(
            role=identity.role,
            name=identity.name,
            url=url,
            pid=identity.pid,
            served_model_name=self.served_model_name,
            fingerprint=self.fingerprint,
            max_model_len=self.max_model_len,
            max_running_requests=self.max_running_requests,
            num_pages=self.memories[0].num_pages,
            side_channel=side_channel,
            weight_version=self.weight_version,
        )


class CannotBind(RuntimeError):
    """This process cannot listen where it was told to; says where and why."""
