"""What a scheduler hands out after each decision: one frozen `StepPlan`, and what comes back.

Pure data. The batch goes to the model runner, the transfer commands to the transfer backend, the
messages to the I/O thread. Results and completions return as `BatchResult` and `TransferEvent`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.events import AdminDone
from common.messages import (
    Grammar,
    Incarnation,
    PeerMemory,
    Room,
    SamplingParams,
    ToDecode,
    TokenLogprob,
    ToPrefill,
    ToRouter,
)

# ---------------------------------------------------------------- the batch


@dataclass(frozen=True, slots=True)
class SlotInit:
    """Given with the first row of a slot's new owner; the runner forgets what it kept there.

    `output_ids` are all outputs known before this step; the runner adds what it samples itself.
    """

    sampling: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a forward pass: some prompt tokens, or one decode token."""

    slot: int
    start: int
    """Absolute position of `token_ids[0]`; KV of all earlier positions is in the slot's pages."""
    token_ids: Sequence[int]
    new_pages: Sequence[int]
    """Page ids appended to the slot's page table before this step."""
    sample_index: int | None
    """Absolute output index to draw after the last token; None for a chunk that is not the last."""
    init: SlotInit | None = None
    lora_slot: int | None = None
    """Where its adapter's weights are; None for the base model."""
    prompt_logprobs: int | None = None
    """Report the log probability of the token after each of `token_ids`, as far as `next_ids` tells
    it, with so many alternatives; None reports nothing."""
    next_ids: Sequence[int] = ()
    """The known tokens at `start + 1, start + 2, ...`; only beside `prompt_logprobs`."""
    from_slot: bool = False
    """Its one token is what its slot drew in the step before, which only the runner knows yet;
    `token_ids` holds the place of it."""


@dataclass(frozen=True, slots=True)
class Batch:
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Sample:
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class NotSampled:
    """Nothing could be drawn: the request's grammar is used up. `error` is for people."""

    error: str


@dataclass(frozen=True, slots=True)
class BatchResult:
    """`samples[i]` belongs to `rows[i]`; None where nothing was to be sampled."""

    samples: tuple[Sample | NotSampled | None, ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """`prompt_logprobs[i]` is what `rows[i]` asked for, one for each of its `next_ids`; empty where
    no row did."""


# ---------------------------------------------------------------- transfers


@dataclass(frozen=True, slots=True)
class AddPeer:
    """Make the pools of a peer's ranks writable; answered by `PeerAdded` or `PeerFailed`."""

    peer: Incarnation
    memories: tuple[PeerMemory, ...]

    @property
    def memory(self) -> PeerMemory:
        """The only one, for a backend that writes to one rank. Raises ValueError if it is not."""
        (memory,) = self.memories
        return memory


@dataclass(frozen=True, slots=True)
class RemovePeer:
    """Forget a peer, also what has come of notifications of its writes that are incomplete.

    Writes posted into it still end with one event each.
    """

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Writes into `peer` may be posted until `until` (this process's monotonic clock)."""

    peer: Incarnation
    until: float


@dataclass(frozen=True, slots=True)
class Write:
    """Copy local pages into a peer's pages, then deliver `notification` there.

    Ends with exactly one `WriteDone` or `WriteFailed`, whatever happens to the peer.
    """

    room: Room
    chunk: int
    peer: Incarnation
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    notification: bytes


@dataclass(frozen=True, slots=True)
class ExpectWrites:
    """A hint: peers' writes into this node are due (`on`), or none is.

    It sets how closely the backend watches for them, never whether they arrive: without it the
    first of a quiet node's notifications comes some tens of milliseconds late.
    """

    on: bool


TransferCommand = AddPeer | RemovePeer | RenewLease | Write | ExpectWrites


@dataclass(frozen=True, slots=True)
class PeerAdded:
    peer: Incarnation


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """The peer could not be added, or its connection broke; its writes end on their own."""

    peer: Incarnation
    error: str


@dataclass(frozen=True, slots=True)
class WriteDone:
    room: Room
    chunk: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The write has ended and can touch no page any more."""

    room: Room
    chunk: int
    error: str


@dataclass(frozen=True, slots=True)
class Notified:
    """A peer's write into this node ended and brought this notification."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class PieceLanded:
    """One of several pieces of a peer's write has landed, and not the last of them.

    The write goes from rank to rank and ends with `Notified` once all pieces are here. Until then,
    or if that never comes, this tells that some bytes of its pages were written.
    """

    payload: bytes
    """The write's notification."""


@dataclass(frozen=True, slots=True)
class PiecesDropped:
    """So many pieces of writes into this node were repeated, or given up: the others never came."""

    count: int


TransferEvent = (
    PeerAdded | PeerFailed | WriteDone | WriteFailed | Notified | PieceLanded | PiecesDropped
)

# ---------------------------------------------------------------- adapters


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """Read an adapter into host memory and check it; ends with `AdapterRead` or `AdapterFailed`.

    `adapter` is this node's number for it, never given twice; `digest` is empty where any content
    will do. A slot that holds it is not touched.
    """

    adapter: int
    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class PlaceAdapter:
    """Copy an adapter from host memory into a slot that no batch uses until the answer,
    `AdapterPlaced` or `AdapterFailed`."""

    adapter: int
    slot: int


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Forget an adapter's weights in host memory. No answer."""

    adapter: int


AdapterCommand = ReadAdapter | PlaceAdapter | DropAdapter


@dataclass(frozen=True, slots=True)
class AdapterRead:
    adapter: int
    digest: str
    rank: int


@dataclass(frozen=True, slots=True)
class AdapterPlaced:
    adapter: int
    slot: int


@dataclass(frozen=True, slots=True)
class AdapterFailed:
    """What was asked last of this adapter could not be done; `error` is for people."""

    adapter: int
    error: str


AdapterEvent = AdapterRead | AdapterPlaced | AdapterFailed

# ---------------------------------------------------------------- grammars


@dataclass(frozen=True, slots=True)
class CompileGrammar:
    """Compile what a room's output must obey; ends with `GrammarCompiled` or `GrammarFailed`."""

    room: Room
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    room: Room


@dataclass(frozen=True, slots=True)
class GrammarFailed:
    """This node cannot compile it; `error` is for people."""

    room: Room
    error: str


GrammarEvent = GrammarCompiled | GrammarFailed

# ---------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class ToRouterMsg:
    router: Incarnation
    body: ToRouter


@dataclass(frozen=True, slots=True)
class ToPeerMsg:
    """For one link; dropped and counted if that is not open any more."""

    peer: Incarnation
    link: int
    body: ToPrefill | ToDecode


@dataclass(frozen=True, slots=True)
class DialPeer:
    """Decode only: connect the side channel to this prefill node and send `PeerHello`.

    `link` is larger than that of every dial before. Ends with exactly one `PeerClosed`.
    """

    peer: Incarnation
    address: str
    link: int


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close this link and stop renewing its lease."""

    peer: Incarnation
    link: int


@dataclass(frozen=True, slots=True)
class ProbePeer:
    """Decode only: does this prefill node's process still exist? Answered by `PeerProbed`."""

    peer: Incarnation
    address: str


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """For all routers: what the prefix cache forgot, then what it has now. Keys are
    `hashing.key`s."""

    evicted: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    cleared: bool = False
    """It forgot everything, before the other two."""


Outgoing = ToRouterMsg | ToPeerMsg | DialPeer | HangUp | ProbePeer | CacheChanged


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One turn's decisions. `batch` is None when there is nothing to compute (or while paused)."""

    batch: Batch | None
    transfers: tuple[TransferCommand, ...]
    messages: tuple[Outgoing, ...]
    adapters: tuple[AdapterCommand, ...] = ()
    grammars: tuple[CompileGrammar, ...] = ()
    answers: tuple[AdminDone, ...] = ()
    """To verbs that took longer than the turn in which they came."""
