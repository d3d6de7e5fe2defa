"""Every message that crosses a process border, one tagged union per direction.

msgpack over ZMQ. Three links carry them:

    router  <──  RouterLink  ──>  node      node dials; `ToNode` down, `ToRouter` up
    prefill <──  PeerLink    ──>  decode    decode dials; `ToPrefill` up, `ToDecode` down
    prefill  ──  NIXL notification ──>  decode   `ChunkLanded`, sent with the last byte of a write

Each ZMQ frame is one `Envelope`: who sent it (an incarnation, fresh at every process start), for
whom it is meant, and its number on this link. A receiver drops and counts what an older incarnation
sent or what is meant for one. Times travel as remaining or elapsed seconds, never as clock values;
`Ping.stamp` is an echo: opaque to its receiver, read only by the process that wrote it.

The key of everything is the `room`: a random 63-bit number, never 0, one for each attempt of each
choice of a request. `rid` is for logs and the public abort only.
"""

from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from common.modes import DisaggregationMode, PauseMode

WIRE_VERSION = 5

Room = int
Incarnation = str


class Wire(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True):
    """Base of all wire types: frozen, tagged by class name, unknown fields ignored."""


class Value(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Base of what wire types contain."""


# ---------------------------------------------------------------- shared values


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    """`text` is a JSON schema; `{}` allows any JSON object."""
    REGEX = "regex"
    """The whole output matches."""
    CHOICE = "choice"
    """`text` is a JSON list of strings, of which the output is one."""
    EBNF = "ebnf"
    """`text` is a context-free grammar in Lark's notation."""


class Grammar(Value, frozen=True):
    """What the output must obey. Its state is rebuilt from the output tokens, so it needs none."""

    kind: GrammarKind
    text: str


class SamplingParams(Value, frozen=True, kw_only=True):
    """How to draw tokens. The router has validated all of it; nodes trust the ranges.

    `stop_token_ids` already holds the model's end-of-sequence ids unless the user said
    `ignore_eos`. Draws are keyed by (`seed`, `choice`, absolute output index).
    """

    max_tokens: int
    seed: int
    choice: int = 0
    temperature: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    logprobs: int | None = None
    """How many alternatives to report beside the chosen token; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first, which has no probability. Such a prompt is
    computed whole: a cached prefix has no logits. Left out once the router has them."""
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None


class TokenLogprob(Value, frozen=True):
    """Natural-log probability of one chosen token, and of the most probable ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None
    """1 for the most probable of all; told of prompt tokens."""


class Adapter(Value, frozen=True):
    """A LoRA adapter as a request names it. Its identity is the digest of its content: two nodes
    that hold different weights under one name never serve one request together."""

    name: str
    digest: str


class AdapterInfo(Value, frozen=True, kw_only=True):
    """An adapter that a node can serve, whether its weights are in memory now or not."""

    name: str
    digest: str
    path: str
    """Local folder or Hugging Face id it was loaded from, on that node."""
    rank: int
    """The largest of its modules' ranks."""
    pinned: bool = False
    """Always in a slot."""


class StopReason(StrEnum):
    """Why a node finished a request by itself."""

    STOP = "stop"
    """A stop token was drawn."""
    LENGTH = "length"
    """`max_tokens` was reached."""


class FailureKind(StrEnum):
    """Why an attempt ended without finishing. The router maps it to replay or to an HTTP error."""

    INVALID = "invalid"
    """The request can never run here: 400."""
    TOO_LARGE = "too_large"
    """Prompt plus max_tokens exceeds this node's pool: 400."""
    REFUSED = "refused"
    """This node takes no more work now (its queue is full): another node, or 429."""
    DRAINING = "draining"
    """This node is leaving and takes nothing new: another node, at once."""
    PEER_LOST = "peer_lost"
    """The other half's node is gone or refused the handshake: replay."""
    TRANSFER = "transfer"
    """KV did not arrive: replay."""
    EXPIRED = "expired"
    """The twin message never came: replay."""
    ENGINE = "engine"
    """The forward pass raised: replay, bounded."""
    ADAPTER = "adapter"
    """This node does not hold the adapter, or cannot read it again: another node, or 404."""


class NodeState(StrEnum):
    READY = "ready"
    PAUSED = "paused"
    DRAINING = "draining"


class Fingerprint(Value, frozen=True, kw_only=True):
    """What two peers must agree on before a page may travel; compared field by field."""

    wire_version: int
    model: str
    """Digest of the model's architecture and weight files' names and sizes."""
    dtype: str
    num_layers: int
    num_kv_heads: int
    """The whole model's, in however many parts its ranks hold them."""
    head_dim: int
    page_size: int


class StageArea(Value, frozen=True, kw_only=True):
    """Host memory that takes writes in place of a pool which the network cannot reach."""

    address: int
    num_slots: int
    """Each as large as a page."""
    boxes_address: int
    """What the owner says of the slots (`transfer.boxes`)."""
    num_boxes: int


class PeerMemory(Value, frozen=True, kw_only=True):
    """The registered page pool of one rank, as a transfer backend describes it to the other side.

    Its pages hold the KV heads `first_head`, `first_head + 1`, ... of the whole model's.
    """

    agent_name: str
    metadata: bytes
    base_address: int
    num_pages: int
    page_bytes: int
    """Of this rank's part of a page."""
    first_head: int
    num_heads: int
    device_id: int = 0
    kind: str = "DRAM"
    stage: StageArea | None = None
    """Where writes go in its place."""


class NodeStats(Value, frozen=True, kw_only=True):
    """A node's load, a plain snapshot taken by the scheduler after a step."""

    state: NodeState = NodeState.READY
    queues: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests per queue, by state name."""
    running: int = 0
    """Requests in `running_batch`; a prefill node always says 0."""
    num_pages: int = 0
    free_pages: int = 0
    """Pages that a request may be given now, cached ones that nobody uses among them."""
    cached_pages: int = 0
    """Pages that the prefix cache knows, used or not."""
    quarantined_pages: int = 0
    queued_tokens: int = 0
    """Prompt tokens not computed yet (prefill), or tokens held by active requests (decode)."""
    counters: dict[str, int] = msgspec.field(default_factory=dict)
    """Monotonic counts: retractions, aborts, stale messages, ..."""
    linked_peers: list[Incarnation] = msgspec.field(default_factory=list)
    """Decode only: prefill nodes with which the handshake is done."""
    lora_slots: int = 0
    """Adapters that may compute together; the base model needs none."""
    lora_slots_used: int = 0
    loras_in_memory: int = 0
    running_loras: dict[str, int] = msgspec.field(default_factory=dict)
    """Adapter name -> unfinished requests, of those that have any."""


# ---------------------------------------------------------------- router -> node


class Welcome(Wire, frozen=True, kw_only=True):
    """Answer to `Hello`. `reset`: this router gave the node up before; end all its rooms."""

    reset: bool = False


class Refused(Wire, frozen=True):
    """Answer to a `Hello` that this router does not accept now; `reason` is one line for people.

    The node may ask again: the reason can go away, as when another node of its name leaves.
    """

    reason: str


class Generate(Wire, frozen=True, kw_only=True):
    """Run one attempt. Sent to the prefill and to the decode node of the pair."""

    room: Room
    rid: str
    attempt: int
    prompt_ids: list[int]
    output_ids: list[int]
    """Tokens that earlier attempts emitted; empty on the first."""
    sampling: SamplingParams
    age_s: float = 0.0
    """How long ago the router accepted the request: its rank among equals in every queue."""
    priority: int = 0
    """Lower values come first in every queue and are retracted last."""
    adapter: Adapter | None = None
    """None: the base model."""
    prefill_address: str = ""
    """Side-channel address of the prefill node; set in the decode node's copy only."""
    prefill_incarnation: Incarnation = ""
    """Empty on a decode node: it computes the prompt itself, beside its running batch."""


class Abort(Wire, frozen=True):
    """End this room without an answer; unknown rooms are tombstoned."""

    room: Room


class PeerGone(Wire, frozen=True):
    """The router has given this node up; whoever waits on it should stop waiting."""

    incarnation: Incarnation


class PeerNode(Value, frozen=True):
    """A prefill node and the side-channel address at which decode nodes dial it."""

    incarnation: Incarnation
    address: str


class Peers(Wire, frozen=True):
    """To decode nodes: all prefill nodes this router has for them; each replaces the one before.

    They are dialled now, so that the first request does not wait for a handshake.
    """

    nodes: list[PeerNode]


class ListCache(Wire, frozen=True):
    """Say again all that is cached; answered by `CacheUpdate`s, the first with `reset`."""


class Ping(Wire, frozen=True):
    """Liveness; `stamp` is echoed and opaque to the receiver."""

    stamp: float
    paused: bool = False
    """The sender makes no forward passes now: do not count its silence about a room."""


class Admin(Wire, frozen=True, kw_only=True):
    """One administrative verb for this node; answered by `AdminReply` with the same id."""

    id: int
    verb: "AdminVerb"


class Pause(Wire, frozen=True):
    mode: PauseMode


class Continue(Wire, frozen=True):
    pass


class FlushCache(Wire, frozen=True):
    pass


class AbortRequests(Wire, frozen=True):
    """Abort by public id; an empty `rid` means all."""

    rid: str = ""


class Drain(Wire, frozen=True):
    """Leave: take nothing new, finish or hand over what is there, say goodbye, end the process."""


class LoadAdapter(Wire, frozen=True, kw_only=True):
    """Read, check and keep an adapter; answered once it can serve, with its digest.

    With a `digest` only that content will do, and having it already is no error.
    """

    name: str
    path: str
    pinned: bool = False
    digest: str = ""


class UnloadAdapter(Wire, frozen=True):
    """Take no new request of this adapter; answered once those here have ended and it is gone."""

    name: str


AdminVerb = Pause | Continue | FlushCache | AbortRequests | Drain | LoadAdapter | UnloadAdapter
ToNode = Welcome | Refused | Generate | Abort | PeerGone | Peers | ListCache | Ping | Admin


# ---------------------------------------------------------------- node -> router


class Hello(Wire, frozen=True, kw_only=True):
    """A node introduces itself; the first message on a link and after every reconnect."""

    role: DisaggregationMode
    name: str
    url: str
    """Base URL of the node's own HTTP endpoint."""
    pid: int
    served_model_name: str
    fingerprint: Fingerprint
    max_model_len: int
    max_running_requests: int
    num_pages: int
    side_channel: str = ""
    """Address decode nodes dial; prefill nodes only."""
    weight_version: str = ""


class Heartbeat(Wire, frozen=True, kw_only=True):
    stats: NodeStats
    step_age_s: float
    """Seconds since the engine thread last finished a loop turn."""


class TokenOutput(Value, frozen=True, kw_only=True):
    """New tokens of one room. `index` is absolute over the whole output, also on replay."""

    room: Room
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: StopReason | None = None
    """Set with the request's very last token."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed for this room; in the first output of the node that
    computed the others."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Of prompt tokens 1, 2, ...; where they were asked for, in the same output."""


class Tokens(Wire, frozen=True):
    """Everything one step produced for one router."""

    outputs: list[TokenOutput]


class Retracted(Wire, frozen=True):
    """This node gave the room's KV up; replay it. All tokens it emitted were sent before this."""

    room: Room


class Failed(Wire, frozen=True, kw_only=True):
    room: Room
    kind: FailureKind
    message: str


class Aborted(Wire, frozen=True):
    """The room ended by a node-side abort (`abort_request`, `pause_generation` mode abort)."""

    room: Room


class AdminReply(Wire, frozen=True, kw_only=True):
    id: int
    ok: bool
    message: str = ""
    digest: str = ""
    """Of the adapter that was loaded."""


class NodeAdapters(Wire, frozen=True):
    """All adapters this node can serve; each replaces the one before.

    Sent first after every `Welcome`, and at each change before the `AdminReply` that tells of it.
    """

    adapters: list[AdapterInfo]


class CacheUpdate(Wire, frozen=True, kw_only=True):
    """What has changed in this node's prefix cache: what it forgot, then what it has now.

    Pages are known by their `hashing.key`, 8 bytes each, native order of x86 and ARM (little
    endian), one after the other. A snapshot is one update with `reset` and others that go on with
    it, so that no message is large.
    """

    seq: int
    """1, 2, 3, ... for each router link; a jump means that an update was lost."""
    reset: bool = False
    """Forget all that was said before."""
    evicted: bytes = b""
    stored: bytes = b""


class Goodbye(Wire, frozen=True):
    """The node leaves on purpose; its rooms are over."""


ToRouter = (
    Hello
    | Heartbeat
    | Tokens
    | Retracted
    | Failed
    | Aborted
    | AdminReply
    | NodeAdapters
    | CacheUpdate
    | Goodbye
)


# ---------------------------------------------------------------- decode -> prefill


class PeerHello(Wire, frozen=True, kw_only=True):
    """Handshake: opens or refreshes the link of this decode incarnation."""

    fingerprint: Fingerprint
    memories: tuple[PeerMemory, ...]
    """One of each rank, in the order of ranks; a page id names a page of each."""
    lease_s: float
    """How long after an echoed `Ping` prefill may still post writes into this node."""
    link: int = 1
    """The dialler's number of this link; a larger one ends those before it."""


class Destination(Wire, frozen=True, kw_only=True):
    """Where the KV of a room goes. `pages[i]` takes logical page `first_page + i`."""

    room: Room
    pages: list[int]
    first_page: int = 0
    """Logical pages before this one are already on decode (prefix cache)."""
    weight_version: str = ""
    adapter: str = ""
    """Digest of the adapter that decode will go on with; empty for the base model."""
    heard: float = 0.0
    """Newest `Ping.stamp` seen: with `lease_s` it renews the link's lease."""
    lease_s: float = 0.0


class Cancel(Wire, frozen=True):
    """Decode wants the room's pages back; answered by `Drained` once no write can touch them."""

    room: Room


class Sync(Wire, frozen=True, kw_only=True):
    """All rooms decode has on this link; prefill answers each that needs one. Idempotent."""

    open: list[Room]
    """Pages are allocated and named in a `Destination`."""
    cancelling: list[Room]
    """Pages are wanted back."""
    pending: list[Room] = msgspec.field(default_factory=list)
    """Known here, but still waiting for pages: prefill should not give them up."""


class Pong(Wire, frozen=True, kw_only=True):
    """Echo of `Ping`; renews the lease."""

    heard: float
    lease_s: float


class PeerBye(Wire, frozen=True):
    """This incarnation leaves. From prefill: none of its writes is or will be under way."""


ToPrefill = PeerHello | Destination | Cancel | Sync | Pong | PeerBye


# ---------------------------------------------------------------- prefill -> decode


class PeerWelcome(Wire, frozen=True, kw_only=True):
    """The handshake succeeded: the transfer backend knows decode's memories."""

    fingerprint: Fingerprint


class PeerRefused(Wire, frozen=True, kw_only=True):
    """The handshake failed for good; `reason` names the field that differs."""

    reason: str


class RoomUnknown(Wire, frozen=True):
    """Answer to `Sync`: this open room is not known here; send `Destination` again."""

    room: Room


class RoomFinished(Wire, frozen=True):
    """The first token ended the request: nothing more will be written."""

    room: Room


class RoomFailed(Wire, frozen=True, kw_only=True):
    """The room is over on prefill and every posted write has ended."""

    room: Room
    kind: FailureKind
    message: str
    landed: list[int] = msgspec.field(default_factory=list)
    """Chunks whose bytes arrived all the same."""


class Drained(Wire, frozen=True, kw_only=True):
    """No write of the cancelled room is or will be posted. `landed`: chunks whose bytes arrived."""

    room: Room
    landed: list[int] = msgspec.field(default_factory=list)


ToDecode = (
    PeerWelcome | PeerRefused | RoomUnknown | RoomFinished | RoomFailed | Drained | Ping | PeerBye
)


# ---------------------------------------------------------------- NIXL notification


class FirstToken(Value, frozen=True, kw_only=True):
    """Rides in the last chunk's notification."""

    total_chunks: int
    token_id: int
    logprob: TokenLogprob | None = None


class ChunkLanded(Wire, frozen=True, kw_only=True):
    """Notification of one write; chunks may land in any order, the last one first."""

    room: Room
    chunk: int
    source: Incarnation
    target: Incarnation
    pages: list[int]
    """Destination pages that this chunk filled."""
    weight_version: str = ""
    last: FirstToken | None = None


# ---------------------------------------------------------------- other versions


class AnyFingerprint(Value, frozen=True):
    """What can be read of every version's `Fingerprint`."""

    wire_version: int


class Introduction(Wire, frozen=True, kw_only=True, tag="Hello"):
    """A `Hello` of a node that speaks another wire version: who it is, and that it is one."""

    name: str
    fingerprint: AnyFingerprint


# ---------------------------------------------------------------- framing

Body = TypeVar("Body")


class Envelope(msgspec.Struct, Generic[Body], frozen=True, gc=False):
    """One ZMQ frame. `to` is empty in a first `Hello` / `PeerHello` that knows no peer yet."""

    source: Incarnation
    to: Incarnation
    seq: int
    """1, 2, 3, ... per (sender, link): a jump means that messages were lost."""
    body: Body


encode = msgspec.msgpack.Encoder().encode
decode_to_node = msgspec.msgpack.Decoder(Envelope[ToNode]).decode
decode_to_router = msgspec.msgpack.Decoder(Envelope[ToRouter]).decode
FromNode = Envelope[ToRouter] | Envelope[Introduction]
"""What a router hears; decoded by the first of two decoders that can."""

decode_introduction = msgspec.msgpack.Decoder(Envelope[Introduction]).decode
decode_to_prefill = msgspec.msgpack.Decoder(Envelope[ToPrefill]).decode
decode_to_decode = msgspec.msgpack.Decoder(Envelope[ToDecode]).decode
decode_notification = msgspec.msgpack.Decoder(ChunkLanded).decode
