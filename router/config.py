"""Router settings: frozen, parsed once by the command line, validated at construction.

Every field is a flag (`node_timeout_s` is `--node-timeout-s`) and its docstring the flag's help.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.adapter_names import name_problem, path_problem
from common.config import DEFAULT_MODEL

PolicyName = Literal["random", "round_robin", "least_loaded", "power_of_two", "cache_aware"]

_POSITIVE = (
    "max_index_pages",
    "max_requests",
    "max_queue_s",
    "max_queued_tokens",
    "max_kv_oversubscription",
    "max_unsent_bytes",
    "send_timeout_s",
    "body_timeout_s",
    "grammar_timeout_s",
    "max_n",
    "max_choices",
    "max_body_bytes",
    "node_timeout_s",
    "heartbeat_s",
    "node_wait_s",
    "request_timeout_s",
    "admin_timeout_s",
    "lora_load_timeout_s",
    "lora_unload_timeout_s",
    "health_timeout_s",
    "backoff_s",
)
_NOT_NEGATIVE = (
    "local_prefill_tokens",
    "drain_s",
    "max_replays_after_death",
    "max_replays_after_fault",
    "max_replays_after_refusal",
    "max_logprobs",
    "max_prompt_logprobs",
)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Flags of the router."""

    model: str = DEFAULT_MODEL
    """Model whose tokenizer is used: local folder, Hugging Face id, or the built-in default."""
    served_model_name: str | None = None
    """Name clients use; the last part of `model` if not given."""
    host: str = "127.0.0.1"
    """Address of the HTTP endpoint."""
    port: int = 8000
    """Port of the HTTP endpoint; 0 takes a free one."""
    node_host: str = "127.0.0.1"
    """Address that nodes dial."""
    node_port: int = 8001
    """Port that nodes dial; 0 takes a free one."""
    prefill_policy: PolicyName = "cache_aware"
    """How a prefill node is chosen."""
    decode_policy: PolicyName = "cache_aware"
    """How a decode node is chosen."""
    session_header: str = "x-session-id"
    """HTTP header that names a conversation: its requests go to the same nodes while these are not
    overloaded, whatever the policy. Empty: no header does."""
    max_index_pages: int = 2_000_000
    """Cached pages of all nodes that the router remembers, about 100 bytes each; the oldest go."""
    local_prefill_tokens: int = 32
    """A decode node that lacks at most so many tokens of a prompt computes them itself, beside its
    running batch, and nothing is transferred. 0: never for that."""
    local_prefill_share: float = 0.9
    """The same if it holds this share of the prompt, and the rest is at most eight times
    local_prefill_tokens."""
    decode_alone: bool = True
    """Where no prefill node is left, decode nodes compute prompts too."""
    max_requests: int = 4096
    """Unfinished choices held at once; more are answered 429."""
    max_queue_s: float = 10.0
    """Longest wait for prefill, by its present pace, that is still accepted; else 429."""
    max_queued_tokens: int = 262_144
    """Prompt tokens that may wait to be computed, for each prefill node; more are answered 429."""
    max_kv_oversubscription: float = 32.0
    """Tokens of KV that unfinished requests may want, as a multiple of what decode nodes hold."""
    max_unsent_bytes: int = 1024 * 1024
    """Output that may wait for a client that does not read its stream; then it is cut off."""
    send_timeout_s: float = 60.0
    """How long a client may leave its stream unread before it is cut off."""
    body_timeout_s: float = 60.0
    """How long a request's body may take to arrive; then 408."""
    grammar_timeout_s: float = 10.0
    """How long a new schema, regex or grammar may wait for its check; then 503. The check itself is
    bounded by half a second of processor time."""
    tool_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = "auto"
    """How the model writes calls of functions; auto: as its chat template shows it."""
    max_n: int = 64
    """Largest `n` of a request."""
    max_choices: int = 1024
    """Largest number of prompts times `n` of a request."""
    max_body_bytes: int = 16 * 1024 * 1024
    """Largest request body; more is answered 413."""
    max_logprobs: int = 20
    """Largest number of alternatives reported per token."""
    max_prompt_logprobs: int = 262_144
    """Logprobs of prompt tokens that one request may ask for, alternatives and all its choices
    included; 262144 take 6 MB on the wire and 20 MB as JSON."""
    node_timeout_s: float = 3.0
    """Silence after which a node is given up and its requests are replayed elsewhere."""
    heartbeat_s: float = 0.5
    """Between two signs of life sent to each node."""
    node_wait_s: float = 30.0
    """How long an accepted request waits for a node when none is left; then 503."""
    request_timeout_s: float = 3600.0
    """Longest life of a request, and what a longer `timeout_s` is cut to; the pause counts."""
    admin_timeout_s: float = 30.0
    """How long an administrative verb waits for the nodes' replies."""
    lora: tuple[str, ...] = ()
    """LoRA adapters to load when nodes join, name=path; repeatable. A path is a local folder on
    the nodes or a Hugging Face id."""
    lora_load_timeout_s: float = 300.0
    """How long an adapter may take to load on all nodes, or on one that joins; then the load is
    undone, or the node works without it."""
    lora_unload_timeout_s: float = 600.0
    """How long an unload waits for the adapter's running requests; then 503, and whoever asks again
    goes on waiting."""
    drain_s: float = 30.0
    """Asked to end, the router takes nothing new and lets requests finish for so long."""
    health_timeout_s: float = 20.0
    """How long /health_generate waits for its token."""
    max_replays_after_death: int = 2
    """Replays of a request whose node died: a poisonous request kills a node each time."""
    max_replays_after_fault: int = 5
    """Replays after a failed transfer or a lost message."""
    max_replays_after_refusal: int = 20
    """Replays after a node had no room for an accepted request; then 429."""
    backoff_s: float = 0.1
    """First wait before a replay after a fault; doubles each time, with jitter."""
    secret_file: str | None = None
    """File with the cluster secret that nodes must have too; else it is read from the environment
    variable PDSERVE_SECRET."""
    api_key_file: str | None = None
    """File with the keys of clients, one a line; those in PDSERVE_API_KEYS (comma separated) count
    as well."""
    admin_key_file: str | None = None
    """File with keys that alone may pause, abort, drain, flush and load adapters;
    PDSERVE_ADMIN_KEYS counts as well. Without any, a client's key may."""
    allow_insecure_bind: bool = False
    """Listen beyond the loopback without API keys or a cluster secret: whoever can reach the ports
    may use them."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines that are written."""

    def __post_init__(self) -> None:
        for field in _POSITIVE:
            if getattr(self, field) <= 0:
                raise ValueError(f"{field} must be positive, not {getattr(self, field)}")
        for field in _NOT_NEGATIVE:
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, not {getattr(self, field)}")
        for field in ("port", "node_port"):
            if not 0 <= getattr(self, field) < 65536:
                raise ValueError(f"{field} must be in [0, 65535], not {getattr(self, field)}")
        for name in parse_adapters(self.lora):
            if name in (self.model_name, self.model):
                raise ValueError(f"lora {name!r}: that is the model's own name")
        if not 0 < self.local_prefill_share <= 1:
            raise ValueError(f"local_prefill_share is in (0, 1], not {self.local_prefill_share}")
        if self.heartbeat_s >= self.node_timeout_s:
            raise ValueError("heartbeat_s must be shorter than node_timeout_s")

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2]


def parse_adapters(flags: Sequence[str]) -> dict[str, str]:
    """Adapters to their paths, of `name=path` flags.

    Raises:
        ValueError: one that cannot be an adapter, or a name twice.
    """
    paths: dict[str, str] = {}
    for flag in flags:
        name, equals, path = flag.partition("=")
        problem = name_problem(name) or path_problem(path)
        if not equals:
            problem = "give name=path"
        elif name in paths:
            problem = "the name is given twice"
        if problem is not None:
            raise ValueError(f"lora {flag[:300]!r}: {problem}")
        paths[name] = path
    return paths
