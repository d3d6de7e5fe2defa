"""Node settings: frozen, parsed once by the command line, validated at construction.

Every field is a flag (`max_model_len` is `--max-model-len`) and its docstring the flag's help.
Derived values (the number of pages, the model's length) are returned by whoever derives them and
never written back here.
"""

import re
from dataclasses import dataclass
from typing import Literal

DEFAULT_MODEL = "smollm2-135m-instruct"
"""A name `deploy/default_model.py` resolves to a converted local folder."""

DtypeFlag = Literal["auto", "float32", "bfloat16", "float16"]


def check_device(device: str) -> None:
    """Raises ValueError for what is not even spelled like a device."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", device):
        raise ValueError(f"device must be cpu, cuda, cuda:N or auto, not {device!r}")


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """What both node roles share."""

    model: str = DEFAULT_MODEL
    """Local folder, Hugging Face id, or the built-in default."""
    served_model_name: str | None = None
    """Name clients use; the last part of `model` if not given."""
    dtype: DtypeFlag = "auto"
    """Weights and KV, equal on all nodes; auto takes the checkpoint's, but on a CPU float32 for
    float16."""
    device: str = "auto"
    """What computes: cpu, cuda, cuda:N, or auto, a GPU where there is one."""
    attention: Literal["auto", "torch", "triton"] = "auto"
    """Kernels: torch's own, Triton's, or auto, Triton's on a GPU."""
    tune_attention: bool = False
    """Measure at start, for a minute, which launch configurations of Triton's attention are fastest
    on this card. What was found is kept in $PDSERVE_CACHE, or ~/.cache/pdserve, and every later
    start uses it."""
    overlap: bool = True
    """Decide a step while the one before it runs, on a GPU."""
    cuda_graphs: bool = True
    """Capture decode steps as CUDA graphs, with Triton's attention."""
    cuda_graph_sizes: tuple[int, ...] = ()
    """Batch sizes that decode steps are captured for, each step padded to the next larger; powers
    of two and `max_running_requests` if none are given."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; the model's own limit if not given."""
    page_size: int = 16
    """Tokens in a KV page; equal on all nodes."""
    num_pages: int | None = None
    """Pages in this node's pool; sized from `kv_cache_gib` or `mem_fraction` if not given."""
    kv_cache_gib: float | None = None
    """Size of the page pool, of all `tp` processes together, when `num_pages` is not given; if
    neither is, 1 GiB on a CPU and `mem_fraction` on a GPU."""
    mem_fraction: float = 0.85
    """Share of a GPU's memory that this node may use, for weights, the work of its largest batch
    and the page pool, which gets what the others leave. Nodes on one GPU divide it: 0.4 each. Does
    not count on a CPU."""
    transfer_staging: Literal["auto", "on", "off"] = "auto"
    """Whether pages travel through host memory; auto does that where NIXL cannot reach a GPU's,
    which it finds out at start by copying a page."""
    staging_gib: float = 1.0
    """Host memory for that, of each of the `tp` processes: pages on their way in and out."""
    prefix_cache: bool = True
    """Keep the pages of finished requests, and do not compute again what they hold."""
    max_running_requests: int = 64
    """Requests computing at the same time."""
    chunk_size: int = 512
    """Prefill tokens a step, shared by the requests in it."""
    host: str = "127.0.0.1"
    """Address this node's sockets bind to and advertise."""
    port: int = 0
    """This node's HTTP port; 0 takes a free one."""
    router: tuple[str, ...] = ("tcp://127.0.0.1:8001",)
    """Routers to join, tcp://host:port; repeatable."""
    name: str | None = None
    """Name in logs and server info, one node's only; role, host and process id if not given."""
    secret_file: str | None = None
    """File with the cluster secret that routers and nodes share; else it is read from the
    environment variable PDSERVE_SECRET."""
    allow_insecure_bind: bool = False
    """Listen beyond the loopback without a cluster secret: whoever can reach the ports may read and
    write what is being served."""
    tp: int = 1
    """Processes of this node that share the model, each with a part of every layer (tensor
    parallelism). Prefill and decode nodes may differ in it."""
    rank_timeout_s: float = 60.0
    """How long the processes of a node wait for each other in the middle of a step; one that does
    not come ends the node."""
    threads: int | None = None
    """Torch threads of each of the node's processes; torch's own choice if not given."""
    cpus: str | None = None
    """Pin this process to these processors, like 0,2-3."""
    heartbeat_s: float = 0.5
    """Between two heartbeats on any link."""
    router_timeout_s: float = 10.0
    """Silence after which a router's requests are aborted."""
    peer_timeout_s: float = 5.0
    """Silence after which the other half's node is taken for gone."""
    lease_s: float = 10.0
    """Prefill posts nothing into decode later than this after decode's last sign of life."""
    longest_post_s: float = 3.0
    """Bound on one posted write; with lease and TCP time-out the least that `unproven_s` may be."""
    unproven_s: float = 60.0
    """How long decode keeps pages that an unreachable prefill may still write into."""
    stopped_peer_s: float = 600.0
    """The same for a prefill whose process exists and says nothing."""
    twin_timeout_s: float = 30.0
    """How long a request waits for its other half's message."""
    transfer_timeout_s: float = 300.0
    """How long decode waits for a request's KV once pages were given."""
    max_loras_per_batch: int = 8
    """Adapters that may compute together; the base model needs none of these slots. With 0 this
    node takes no adapters, and on a GPU keeps no memory for them."""
    max_loaded_loras: int = 64
    """Adapters whose weights are kept in host memory; of more, those least recently used are read
    again when they are wanted."""
    max_lora_rank: int | None = None
    """Largest rank of an adapter; 256 on a CPU and 64 on a GPU if not given. Slots are made for it:
    on a CPU in memory that the system gives when it is first used, on a GPU in one piece, which is
    taken with the first adapter and kept free for it from the start."""
    lora_drain_wait_s: float = 2.0
    """A request that has waited so long for a slot for its adapter has one emptied for it."""
    drain_s: float = 30.0
    """Asked to end, a node finishes what it computes for so long, then hands it over."""
    max_queued_requests: int = 4096
    """Requests that may wait here without KV; more are refused and go to another node."""
    stuck_engine_s: float = 300.0
    """Age of the last step after which /health says no."""
    tcp_timeout_s: float = 10.0
    """KV written over TCP that is not acknowledged for so long breaks its connection: a host that
    vanished would otherwise hold the pages of writes to it for a quarter of an hour. Sets
    UCX_TCP_USER_TIMEOUT where the environment does not."""
    ucx_tls: str | None = None
    """Sets UCX_TLS, like tcp."""
    nixl_params: tuple[str, ...] = ()
    """Parameters of NIXL's UCX backend, key=value; repeatable."""

    def __post_init__(self) -> None:
        positive = (
            "page_size", "max_running_requests", "chunk_size", "heartbeat_s", "router_timeout_s",
            "peer_timeout_s", "tcp_timeout_s", "lease_s", "twin_timeout_s", "transfer_timeout_s",
            "max_queued_requests", "tp", "rank_timeout_s", "staging_gib",
        )  # fmt: skip
        for field in positive:
            if getattr(self, field) <= 0:
                raise ValueError(f"{field} must be positive, not {getattr(self, field)}")
        for field in ("drain_s", "lora_drain_wait_s", "max_loras_per_batch"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, not {getattr(self, field)}")
        if self.max_loaded_loras < self.max_loras_per_batch:
            slots = self.max_loras_per_batch
            raise ValueError(f"max_loaded_loras must be at least max_loras_per_batch, {slots}")
        for field in ("max_model_len", "num_pages", "threads", "kv_cache_gib", "max_lora_rank"):
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise ValueError(f"{field} must be positive, not {value}")
        for size in self.cuda_graph_sizes:
            if size <= 0:
                raise ValueError(f"cuda_graph_sizes must be positive, not {size}")
        check_device(self.device)
        if not 0 < self.mem_fraction <= 1:
            raise ValueError(f"mem_fraction must be in (0, 1], not {self.mem_fraction}")
        # After these no byte that an unreachable prefill has sent can still be on its way.
        least = self.lease_s + self.longest_post_s + self.tcp_timeout_s
        if self.unproven_s < least:
            parts = "lease_s + longest_post_s + tcp_timeout_s"
            raise ValueError(f"unproven_s must be at least {parts}, {least:g}")
        if self.stopped_peer_s < self.unproven_s:
            raise ValueError(f"stopped_peer_s must be at least unproven_s, {self.unproven_s:g}")
        for address in self.router:
            if not address.startswith("tcp://"):
                raise ValueError(f"router must look like tcp://host:port, not {address!r}")


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(NodeConfig):
    """Flags of a prefill node."""

    side_channel_port: int = 0
    """Port that decode nodes dial; 0 takes a free one."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(NodeConfig):
    """Flags of a decode node."""

    reserve_pages: int = 8
    """Pages kept free at admission for each active request, so that retraction stays rare."""
    local_chunk_size: int = 64
    """Prompt tokens that this node computes itself in a step beside its running batch; where
    nobody runs a step takes chunk_size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_chunk_size <= 0:
            raise ValueError(f"local_chunk_size must be positive, not {self.local_chunk_size}")
