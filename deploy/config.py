"""Settings of the commands that are no node and no router: the local cluster and the chat.

Frozen, parsed once, validated at construction; every field is a flag and its docstring the help.
"""

import shlex
from dataclasses import dataclass
from typing import Literal

from common.config import DEFAULT_MODEL, DtypeFlag, check_device

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Flags of a cluster on one machine: a router, prefill nodes and decode nodes."""

    model: str = DEFAULT_MODEL
    """Local folder, Hugging Face id, or the built-in default."""
    served_model_name: str | None = None
    """Name clients use; the last part of `model` if not given."""
    dtype: DtypeFlag = "auto"
    """Weights and KV; auto takes the checkpoint's, but on a CPU float32 for float16."""
    device: str = "auto"
    """What every node computes on: cpu, cuda, cuda:N, or auto, a GPU where there is one. For nodes
    on different GPUs give --device in --prefill-args and --decode-args, with --mem-fraction."""
    attention: Literal["auto", "torch", "triton"] = "auto"
    """Kernels: torch's own, Triton's, or auto, Triton's on a GPU."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; the model's own limit if not given."""
    page_size: int = 16
    """Tokens in a KV page."""
    num_pages: int | None = None
    """Pages in each node's pool; sized by the node's --kv-cache-gib, or on a GPU by mem_fraction,
    if not given."""
    mem_fraction: float = 0.85
    """Share of a GPU's memory that the nodes on it may use together: each gets an equal part. Does
    not count on a CPU."""
    transfer_staging: Literal["auto", "on", "off"] = "auto"
    """Whether pages travel through host memory; auto does that where NIXL cannot reach a GPU's."""
    tp: int = 1
    """Processes of each node that share the model; for one role alone give --tp in its own flags,
    with --threads."""
    max_running_requests: int = 64
    """Requests computing at the same time on a node."""
    chunk_size: int = 512
    """Prefill tokens a step, shared by the requests in it."""
    lora: tuple[str, ...] = ()
    """LoRA adapters to load at start, name=path; repeatable. A path is a local folder or a Hugging
    Face id."""
    max_loras_per_batch: int = 8
    """Adapters that may compute together on a node; the base model needs none of these slots. With
    0 nodes take no adapters."""
    max_loaded_loras: int = 64
    """Adapters whose weights a node keeps in host memory; of more, those least recently used are
    read again when they are wanted."""
    max_lora_rank: int | None = None
    """Largest rank of an adapter; 256 on a CPU and 64 on a GPU if not given."""
    lora_drain_wait_s: float = 2.0
    """A request that has waited so long for a slot for its adapter has one emptied for it."""
    host: str = "127.0.0.1"
    """Address of the HTTP endpoint; the nodes stay on the loopback."""
    port: int = 8000
    """Port of the HTTP endpoint; 0 takes a free one."""
    secret_file: str | None = None
    """File with the cluster secret, else PDSERVE_SECRET; a random one is made if there is none."""
    api_key_file: str | None = None
    """File with the keys of clients, one a line; PDSERVE_API_KEYS counts as well."""
    admin_key_file: str | None = None
    """File with keys that alone may pause, abort, drain and flush; PDSERVE_ADMIN_KEYS counts as
    well."""
    allow_insecure_bind: bool = False
    """Let --host open the endpoint beyond the loopback without API keys."""
    prefill: int = 1
    """Number of prefill nodes; with none decode nodes compute prompts too."""
    decode: int = 1
    """Number of decode nodes."""
    prefill_args: str = ""
    """More flags for each prefill node, quoted as one argument."""
    decode_args: str = ""
    """More flags for each decode node, quoted as one argument."""
    router_args: str = ""
    """More flags for the router, quoted as one argument."""
    cpus_prefill: str | None = None
    """Processors of the prefill nodes: one set for all like 0-3, or one a node like 0;1."""
    cpus_decode: str | None = None
    """Processors of the decode nodes, in the same way."""
    ask: str | None = None
    """Once ready, ask this and print the model's answer."""
    restart: bool = True
    """Start a child again that dies after the cluster was ready."""
    start_timeout_s: float = 600.0
    """How long the children may take until a request can be served."""
    drain_s: float = 30.0
    """Asked to end, the cluster lets requests finish for so long; a second signal ends it."""
    stop_timeout_s: float = 10.0
    """How long beyond drain_s the children may take to end before they are killed."""

    def __post_init__(self) -> None:
        if self.prefill < 0:
            raise ValueError(f"prefill must not be negative, not {self.prefill}")
        for field in ("decode", "tp", "start_timeout_s", "stop_timeout_s"):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field} must be positive, not {getattr(self, field)}")
        check_device(self.device)
        if not 0 < self.mem_fraction <= 1:
            raise ValueError(f"mem_fraction must be in (0, 1], not {self.mem_fraction}")
        if self.drain_s < 0:
            raise ValueError(f"drain_s must not be negative, not {self.drain_s}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be in [0, 65535], not {self.port}")
        for field in ("prefill_args", "decode_args", "router_args"):
            try:
                shlex.split(getattr(self, field))
            except ValueError as error:
                raise ValueError(f"{field} cannot be split: {error}") from error
        for field, nodes in (("cpus_prefill", self.prefill), ("cpus_decode", self.decode)):
            sets = cpu_sets(getattr(self, field))
            if len(sets) > 1 and len(sets) != nodes:
                raise ValueError(f"{field} has {len(sets)} sets for {nodes} nodes")
            for processors in sets:
                parse_cpus(processors)


@dataclass(frozen=True, kw_only=True)
class NodeKeyConfig:
    """Flags of the command that prints the key of the nodes' own HTTP."""

    secret_file: str | None = None
    """File with the cluster secret, else PDSERVE_SECRET."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Flags of the terminal chat."""

    url: str = DEFAULT_URL
    """Base URL of the endpoint."""
    model: str | None = None
    """Model to ask; the endpoint's first one if not given."""
    system: str | None = None
    """System message that opens the conversation."""
    max_tokens: int | None = None
    """Longest answer in tokens; what fits if not given."""
    temperature: float | None = None
    """Sampling temperature; the endpoint's default if not given."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must look like {DEFAULT_URL}, not {self.url!r}")


def cpu_sets(text: str | None) -> list[str]:
    """The processor sets of `0-3;4-7`, one string a node; empty if nothing was given."""
    return [part.strip() for part in text.split(";")] if text else []


def parse_cpus(text: str) -> frozenset[int]:
    """The processors of `0,2-3`. Raises ValueError for anything else."""
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = [first, last] if dash else [first]
        if not all(number.strip().isdecimal() for number in numbers):
            raise ValueError(f"processors look like 0,2-3, not {text!r}")
        span = range(int(first), int(numbers[-1]) + 1)
        if not span:
            raise ValueError(f"processors {part!r} count backwards")
        chosen.update(span)
    return frozenset(chosen)
