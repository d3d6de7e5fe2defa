"""The scheduler both node roles share: events go in, a frozen `StepPlan` comes out.

Pure: no torch, no sockets, no NIXL, no clock reads. Time comes in with each event. One turn is

    handle(event, now)*  on_transfer(event, now)*  schedule(now) -> StepPlan
    ... the loop submits the plan's transfers, sends its messages, launches its batch ...
    process_batch_result(result, now)   or   process_batch_failure(error, now)

where the next turn may come before the last two lines, as `common.flight` says. Control messages
are only ever handled between steps, when no batch is in flight or half taken in.

Order of side effects inside a turn: a request is moved first, then its pages change hands, then
the router and the peer are told. Every accepted request leaves through `_stop` (its router is told
why) or by finishing; either way exactly once, since both end in `_retire`, which removes it.

After dask's `WorkerState` (events -> instructions, no I/O) and vLLM's schedule/update pair.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain
from typing import assert_never, final

from common.drain import Leave
from common.events import Fact, FromRouter, RouterLost, RouterOrder
from common.flight import Flight
from common.grammar.desk import GrammarDesk
from common.intake import never_fits, not_now
from common.invariants import check_queues
from common.kv_cache.manager import KVCacheManager
from common.ledger import Ledger
from common.lifecycle import Edges, R, ReqQueue, State, is_over
from common.lora.desk import AdapterDesk
from common.messages import (
    Abort,
    Aborted,
    AdapterInfo,
    Failed,
    FailureKind,
    Generate,
    Incarnation,
    LoadAdapter,
    NodeStats,
    PeerGone,
    Peers,
    Retracted,
    Room,
    TokenLogprob,
    ToRouter,
    UnloadAdapter,
)
from common.modes import PauseMode
from common.outbox import Outbox
from common.plan import (
    AdapterEvent,
    Batch,
    BatchResult,
    GrammarEvent,
    NotSampled,
    PeerFailed,
    PiecesDropped,
    StepPlan,
    TransferEvent,
)
from common.role import Role
from common.settings import SchedulerSettings
from common.slots import Slots
from common.stats import Report
from common.tombstones import Ending, Tombstone, Tombstones


class Scheduler(Role[R]):
    """State machine of one node. Subclasses: `PrefillScheduler`, `DecodeScheduler`."""

    def __init__(self, settings: SchedulerSettings, edges: Edges) -> None:
        self.settings = settings
        self.queues: dict[State, ReqQueue[R]] = {
            state: ReqQueue(state, edges) for state in edges if state is not None
        }
        self.ledger = Ledger()
        self.kv = KVCacheManager.of_node(settings, self.counters)
        self._ended: ReqQueue[R] = ReqQueue(State.ENDED, edges)
        self._reqs: dict[Room, R] = {}
        self._rooms_by_rid: dict[tuple[Incarnation, str], Room] = {}
        self._tombstones = Tombstones(settings.tombstone_s)
        self._outbox = Outbox()
        self._slots = Slots(settings.max_running_requests)
        self._flight: Flight[R] = Flight(self._slots, self.kv)
        self._lora = AdapterDesk(
            settings,
            self.ledger,
            holders=lambda: chain(self._slot_holders(), self._flight.lingering),
            unfinished=lambda: chain(self._live(), self._flight.lingering),
        )
        self._grammars = GrammarDesk()
        self.paused: PauseMode | None = None
        """The mode of the pause in force."""
        self.leave = Leave(settings.drain_s, settings.longest_post_s)
        self._now = 0.0

    @property
    def counters(self) -> Counter[str]:
        return self.ledger.counters

    @property
    def running_batch(self) -> Collection[R]:
        """Requests generating tokens here; a node that never decodes has none."""
        return ()

    # ------------------------------------------------------------ events

    @final
    def handle(self, event: Fact, now: float) -> None:
        """Take in one fact from the I/O thread."""
        self._now = now
        match event:
            case FromRouter(router, body):
                self._on_router_message(router, body)
            case RouterLost(router):
                self._on_peers(router, None)
                for req in self.unfinished():
                    if req.router == router:
                        self._stop(req, None, FailureKind.REFUSED, "its router is gone")
            case _:
                self._on_peer_event(event)

    def _on_router_message(self, router: Incarnation, body: RouterOrder) -> None:
        match body:
            case Generate():
                self.add_request(body, router)
            case Abort(room):
                self.abort_room(room)
            case PeerGone(peer):
                self._on_peer_lost(peer, "the router gave the peer up")
            case Peers(nodes):
                self._on_peers(router, nodes)
            case _:
                assert_never(body)

    @final
    def on_transfer(self, event: TransferEvent, now: float) -> None:
        """Take in one fact from the transfer backend."""
        self._now = now
        match event:
            case PeerFailed(peer, error):
                self._on_peer_lost(peer, error)
            case PiecesDropped(count):
                self.counters["dropped_pieces"] += count
            case _:
                self._on_transfer_event(event)

    @final
    def on_adapter(self, event: AdapterEvent, now: float) -> None:
        """Take in one fact from the adapter loader. A failure concerns those that wait for it."""
        self._now = now
        problem = self._lora.on_event(event)
        if problem is not None:
            for req in [req for state in self._NOT_COMPUTED for req in self.queues[state]]:
                if req.lora == event.adapter:
                    self._fail(req, FailureKind.ADAPTER, problem)

    @final
    def on_grammar(self, event: GrammarEvent, now: float) -> None:
        """Take in one fact from the grammar compiler. A failure concerns that request."""
        self._now = now
        self._grammars.on_event(event, self._reqs.get(event.room), self._fail)

    def add_request(self, generate: Generate, router: Incarnation) -> None:
        """Accept one attempt, or tell its router why not. Repeated and ended rooms are dropped."""
        room = generate.room
        if room in self._reqs or room in self._tombstones:
            self.counters["stale_messages"] += 1
            return
        previous = self._rooms_by_rid.get((router, generate.rid))
        if previous is not None and self._reqs[previous].attempt < generate.attempt:
            self.abort_room(previous)
        req = self._new_request(generate, router)
        waiting = sum(len(self.queues[state]) for state in self._WITHOUT_PAGES)
        refusal = (
            not_now(waiting, self.settings, self.leave)
            or never_fits(req, self.settings, self._pages_needed(req))
            or self._lora.refusal(req)
        )
        if refusal is not None:
            kind, message = refusal
            self.counters["refusals"] += 1
            self._outbox.to_router(router, Failed(room=room, kind=kind, message=message))
            stone = Tombstone(Ending.FAILED, kind=kind, message=message)
            self._tombstones.add(room, stone, self._now)
            return
        self._reqs[room] = req
        self._rooms_by_rid[router, req.rid] = room
        self._lora.assign(req)
        self._grammars.want(req)
        self._accept(req)

    def abort_room(self, room: Room) -> None:
        """End a room without an answer; a room not seen yet will be dropped when it comes."""
        req = self._reqs.get(room)
        if req is not None:
            self._stop(req, None, FailureKind.REFUSED, "aborted by the router")
        elif room not in self._tombstones:
            stone = Tombstone(Ending.FAILED, kind=FailureKind.REFUSED, message="aborted")
            self._tombstones.add(room, stone, self._now)

    @final
    def abort_requests(self, rid: str = "") -> int:
        """Abort by public id (all if empty) and tell the routers; returns how many."""
        found = [req for req in self.unfinished() if rid in ("", req.rid)]
        for req in found:
            self._stop(req, Aborted(req.room), FailureKind.REFUSED, "aborted")
        return len(found)

    # ------------------------------------------------------------ adapters

    @final
    def change_adapters(self, ticket: int, verb: LoadAdapter | UnloadAdapter) -> None:
        """Answered in a later plan, once the adapter can serve (or cannot be loaded), or is gone:
        new requests of one that is unloaded fail from now on."""
        self._lora.change(ticket, verb)

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """What this node can serve; the same object until that changes."""
        return self._lora.adapters

    # ------------------------------------------------------------ pause, flush, drain

    @final
    def pause_generation(self, mode: PauseMode) -> None:
        """Stop forward passes, and treat unfinished requests as `mode` says. Repeatable.

        Called only between steps. On an idle node nothing else happens: each mode works on single
        requests, and no request means no work.
        """
        self.paused = mode
        if mode is PauseMode.RETRACT:
            for req in tuple(self._retractable()):
                self._retract(req)
        elif mode is PauseMode.ABORT:
            self.abort_requests()
        if mode.empties_node:
            self.kv.clear_cache()

    @final
    def continue_generation(self) -> None:
        self.paused = None

    def flush_cache(self) -> str | None:
        """Empty the prefix cache; returns why it cannot be done now, or None."""
        return self.kv.flush(self._reqs.values())

    @property
    def is_empty(self) -> bool:
        """No request is here, and neither a transfer nor a step can touch a page of this node."""
        return not (self._reqs or self.kv.num_quarantined or self._flight)

    # ------------------------------------------------------------ steps

    @final
    def schedule(self, now: float) -> StepPlan:
        """Decide the next step. While paused the batch is empty, whatever the role."""
        self._now = now
        assert self.may_run_ahead, "the last step's result was not taken in"
        self._tombstones.expire(now)
        self._expire()
        paused = self.paused is not None
        if self.leave.under_way:
            for req in self.leave.to_hand_over(self.unfinished(), now, paused=paused):
                self._retract(req)
        self._lora.begin_turn(now)
        self._advance()
        rows = [] if paused else self._select()
        if rows:
            self._flight.begin(rows)
        if self.leave.under_way:
            self._lora.dismiss(for_good=self.leave.may_end(now, is_empty=self.is_empty))
            if self.is_empty:
                self._say_goodbye()
        self._outbox.cache_changed(self.kv.take_changes())
        transfers, messages = self._outbox.drain()
        adapters, answers = self._lora.end_turn(rows)
        grammars = self._grammars.take_commands()
        batch = Batch(tuple(row for _, row in rows)) if rows else None
        return StepPlan(batch, transfers, messages, adapters, grammars, answers)

    @property
    def may_run_ahead(self) -> bool:
        """Whether `schedule` may be called before the newest plan's batch is taken in."""
        return self._flight.may_run_ahead

    @final
    def process_batch_result(self, result: BatchResult, now: float) -> None:
        """Take in what the runner computed for the oldest batch that is in flight."""
        self._now = now
        step = self._flight.land()
        for (req, _), scores in zip(step, result.prompt_logprobs, strict=False):
            if req.prompt_logprobs is not None:
                req.prompt_logprobs += scores
        for (req, row), sample in zip(step, result.samples, strict=True):
            if is_over(req):
                self.counters["wasted_rows"] += 1
            elif isinstance(sample, NotSampled):
                self._fail(req, FailureKind.INVALID, sample.error)
            else:
                self._on_computed(req, row, sample)

    @final
    def process_batch_failure(self, error: str, now: float) -> None:
        """The forward pass raised: its requests fail, the node goes on."""
        self._now = now
        self.counters["failed_steps"] += 1
        for req, _ in self._flight.land():
            if not is_over(req):
                self._fail(req, FailureKind.ENGINE, error)

    # ------------------------------------------------------------ how requests end

    @final
    def unfinished(self) -> list[R]:
        """Requests whose router has not been told an end, in rank order."""
        return sorted(self._live(), key=lambda req: req.rank)

    def _live(self) -> Iterator[R]:
        """The same in any order."""
        return (req for req in self._reqs.values() if not is_over(req))

    def _fail(self, req: R, kind: FailureKind, message: str) -> None:
        self._stop(req, Failed(room=req.room, kind=kind, message=message), kind, message)

    def _retract(self, req: R) -> None:
        """Give one request's KV up and hand it back to its router for replay."""
        self.counters["retractions"] += 1
        self._stop(req, Retracted(req.room), FailureKind.REFUSED, "retracted")

    def _stop(self, req: R, answer: ToRouter | None, kind: FailureKind, message: str) -> None:
        """End a request that has not finished. Its router hears `answer` at once."""
        if req in self.queues[State.ABORTING]:
            return
        if answer is not None:
            self._outbox.to_router(req.router, answer)
        else:
            self.counters["aborts"] += 1
        self.ledger.ended(req, message if answer is None else type(answer).__name__.lower())
        self._flight.take_slot_back(req)
        self._let_go(req, kind, message)

    def _retire(self, req: R, stone: Tombstone) -> None:
        """The request's last act: no transfer can touch its pages any more."""
        self._flight.release(req)
        self._ended.take(req)
        del self._reqs[req.room]
        if self._rooms_by_rid.get((req.router, req.rid)) == req.room:
            del self._rooms_by_rid[req.router, req.rid]
        self._tombstones.add(req.room, stone, self._now)

    # ------------------------------------------------------------ tokens, reports

    def _emit(self, req: R, logprob: TokenLogprob | None, *, repeat: bool = False) -> None:
        """Send the newest output token, with its finish reason, to the request's router."""
        self._outbox.tokens(req.router, req.newest_output(logprob, repeat=repeat))
        if not repeat:
            self.ledger.token(req, self._now)

    def _mark(self, req: R, stage: str) -> None:
        self.ledger.mark(req, stage, self._now)

    def stats(self) -> NodeStats:
        """A snapshot of this node's load."""
        stats = NodeStats(
            state=self.leave.state(paused=self.paused is not None),
            queues={state.name.lower(): len(queue) for state, queue in self.queues.items()},
            running=len(self.running_batch),
            num_pages=self.kv.num_pages,
            free_pages=self.kv.num_free,
            cached_pages=self.kv.num_cached,
            quarantined_pages=self.kv.num_quarantined,
            queued_tokens=self._queued_tokens(),
            counters=dict(self.counters),
        )
        return self._lora.add_to(stats)

    def _queued_tokens(self) -> int:
        return sum(req.num_tokens for req in self._reqs.values())

    @final
    def take_report(self) -> Report:
        """Statistics now, and all samples and ends since the last call."""
        return self.ledger.take(self.stats())

    # ------------------------------------------------------------ invariants

    def check_invariants(self) -> None:
        """Raise unless every request, page and slot is in exactly one place."""
        check_queues(self.queues, self._reqs, self._tombstones)
        holders = {*self._reqs.values(), *self._flight.lingering}
        self.kv.check(holders)
        self._slots.check(holders)
        self._lora.check(holders)
