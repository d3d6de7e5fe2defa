"""The prefill node's scheduler: prompts in, KV pages written into decode's memory.

    Generate ─▶ bootstrap ─(Destination)─▶ waiting ─(pages, slot)─▶ prefilling ─▶ inflight ─▶ end
                   │                          │                        │             │
                   └─────── end ◀─────────────┘                        └▶ aborting ◀─┘ ─▶ end

* `Destination` and `Generate` come in either order; one whose twin never comes expires.
* All pages of a prompt are taken at once, at admission: no request holds some and waits for more.
  Of them the first may be cached ones; those that decode lacks are posted there and then.
* After each chunk its complete pages are posted as one write; the last write carries the first
  token, which also goes straight to the router.
* A page is freed only when no posted write reads it: `posted` holds the chunks under way, and a
  stopped request with any of them stays in ABORTING until the last one's event.
* Decode is told the end of a room only then: `RoomFailed` or `Drained` always mean that nothing
  will touch decode's pages any more.
"""

from collections.abc import Iterable
from typing import assert_never, cast

from common.chunked_prefill import next_chunks
from common.events import FromPeer, PeerClosed, PeerProbed
from common.lifecycle import PREFILL_EDGES, State
from common.messages import (
    Cancel,
    Destination,
    Drained,
    FailureKind,
    FirstToken,
    Generate,
    Incarnation,
    PeerBye,
    PeerHello,
    PeerRefused,
    Pong,
    Room,
    RoomFailed,
    RoomFinished,
    RoomUnknown,
    Sync,
    ToPrefill,
)
from common.plan import (
    Notified,
    PeerAdded,
    PieceLanded,
    Row,
    Sample,
    WriteDone,
    WriteFailed,
)
from common.scheduler import Scheduler
from common.settings import SchedulerSettings
from common.tombstones import Ending, Tombstone
from prefill_node.answers import destination_problem, ending
from prefill_node.early import EarlyDestinations
from prefill_node.peers import DecodeLinks
from prefill_node.request import PrefillReq
from prefill_node.writes import next_write

NOT_LINKED = "not linked: shake hands again"


class PrefillScheduler(Scheduler[PrefillReq]):
    """Scheduler subclass for `DisaggregationMode.PREFILL`."""

    _WITHOUT_PAGES = (State.BOOTSTRAP, State.WAITING)
    _NOT_COMPUTED = _WITHOUT_PAGES

    def __init__(self, settings: SchedulerSettings, head_bytes: int) -> None:
        """`head_bytes`: what one KV head takes in a page, over all layers."""
        super().__init__(settings, PREFILL_EDGES)
        self.bootstrap_queue = self.queues[State.BOOTSTRAP]
        self.waiting_queue = self.queues[State.WAITING]
        self.prefilling = self.queues[State.PREFILLING]
        self.inflight_queue = self.queues[State.INFLIGHT]
        self.aborting_queue = self.queues[State.ABORTING]
        self.links = DecodeLinks(settings.fingerprint, head_bytes, self._outbox)
        self._early = EarlyDestinations(settings.twin_timeout_s)

    # ------------------------------------------------------------ new requests

    def _new_request(self, generate: Generate, router: Incarnation) -> PrefillReq:
        fields = PrefillReq.fields_of(generate, router, self._now)
        return PrefillReq(**fields, twin_deadline=self._now + self.settings.twin_timeout_s)

    def _pages_needed(self, req: PrefillReq) -> int:
        return self.kv.pages_for(req.num_tokens)

    def _accept(self, req: PrefillReq) -> None:
        self.bootstrap_queue.take(req)
        self._lora.prefetch(req, self._now)
        early = self._early.pop(req.room)
        if early is not None:
            self._bind(req, early.peer, early.destination)

    def _bind(self, req: PrefillReq, peer: Incarnation, destination: Destination) -> None:
        """The request's twin messages have met."""
        req.peer, req.destination = peer, destination
        num_pages = self.kv.pages_for(req.num_tokens)
        problem = destination_problem(
            destination,
            num_pages,
            self.links.num_pages(peer),
            self.settings.weight_version,
            req.adapter_digest,
        )
        if problem is not None:
            self._fail(req, FailureKind.TRANSFER, problem)
            return
        req.pages_written = destination.first_page
        self.waiting_queue.take(req)
        self._mark(req, "bootstrap")

    # ------------------------------------------------------------ messages from decode

    def _on_peer_event(self, event: FromPeer | PeerClosed | PeerProbed) -> None:
        match event:
            case FromPeer(peer, link, body):
                message = cast(ToPrefill, body)
                if isinstance(message, PeerHello):
                    self._on_hello(peer, link, message)
                elif self.links.is_current(peer, link):
                    self._on_peer_message(peer, message)
                else:
                    self.counters["stale_messages"] += 1
                    self._outbox.to_peer(peer, link, PeerRefused(reason=NOT_LINKED))
            case PeerClosed(peer, link, why):
                if self.links.is_current(peer, link):
                    self._on_peer_lost(peer, why)
            case PeerProbed():
                raise AssertionError("a prefill node asks for no probe")
            case _:
                assert_never(event)

    def _on_hello(self, peer: Incarnation, link: int, hello: PeerHello) -> None:
        """Decode opens a link anew only when the one before is over, and its rooms given up."""
        if self.links.supersedes(peer, link):
            self._on_peer_lost(peer, "decode shook hands anew")
        if not self.links.on_hello(peer, link, hello):
            self.counters["stale_messages"] += 1

    def _on_peer_message(
        self, peer: Incarnation, message: Destination | Cancel | Sync | Pong | PeerBye
    ) -> None:
        match message:
            case Pong():
                self.links.renew(peer, min(message.heard, self._now), message.lease_s)
            case PeerBye():
                self._on_peer_lost(peer, "decode said goodbye")
            case Destination():
                self._on_destination(peer, message)
            case Cancel(room):
                self._on_cancel(peer, room)
            case Sync():
                self._on_sync(peer, message)
            case _:
                assert_never(message)

    def _on_destination(self, peer: Incarnation, destination: Destination) -> None:
        if self.links.num_pages(peer) is None:
            self.counters["stale_messages"] += 1
            self.links.send(peer, PeerRefused(reason=NOT_LINKED))
            return
        self.links.renew(peer, min(destination.heard, self._now), destination.lease_s)
        room = destination.room
        req = self._reqs.get(room)
        if req is not None:
            if req in self.bootstrap_queue:
                self._bind(req, peer, destination)
        elif room in self._tombstones:
            self._repeat_ending(peer, room)
        else:
            self._early.keep(peer, destination, self._now)

    def _on_cancel(self, peer: Incarnation, room: Room) -> None:
        """Answer `Drained` as soon as no write into the room's pages is or can be posted."""
        self._early.pop(room)
        req = self._reqs.get(room)
        if req is None:
            stone = self._tombstones.get(room)
            if stone is None:
                stone = Tombstone(Ending.FAILED, message="cancelled by decode")
                self._tombstones.add(room, stone, self._now)
            self.links.send(peer, Drained(room=room, landed=sorted(stone.landed)))
            return
        if req.peer not in ("", peer):
            self.counters["stale_messages"] += 1
            return
        req.peer = peer
        req.cancelled = True
        self._stop(req, None, FailureKind.REFUSED, "cancelled by decode")

    def _on_sync(self, peer: Incarnation, sync: Sync) -> None:
        """Level-triggered repair: whatever message was lost, say again what decode needs."""
        if self.links.num_pages(peer) is None:
            self.links.send(peer, PeerRefused(reason=NOT_LINKED))
            return
        for room in sync.cancelling:
            self._on_cancel(peer, room)
        for room in sync.open:
            req = self._reqs.get(room)
            if room in self._tombstones:
                self._repeat_ending(peer, room)
            elif req in self.bootstrap_queue or (req is None and room not in self._early):
                self.links.send(peer, RoomUnknown(room))
        for room in sync.pending:
            waiting = self._reqs.get(room)
            if waiting is not None:
                waiting.twin_deadline = self._now + self.settings.twin_timeout_s

    def _repeat_ending(self, peer: Incarnation, room: Room) -> None:
        stone = self._tombstones.get(room)
        assert stone is not None
        said = ending(room, stone)
        if said is not None:
            self.links.send(peer, said)

    def _on_transfer_event(
        self, event: PeerAdded | WriteDone | WriteFailed | Notified | PieceLanded
    ) -> None:
        match event:
            case PeerAdded(peer):
                self.links.on_added(peer)
            case WriteDone(room, chunk, num_bytes, seconds):
                self.ledger.transferred(num_bytes, seconds)
                self._on_write_ended(room, chunk, None)
            case WriteFailed(room, chunk, error):
                self.counters["failed_writes"] += 1
                self._on_write_ended(room, chunk, error)
            case Notified() | PieceLanded():
                self.counters["stale_messages"] += 1
            case _:
                assert_never(event)

    def _on_peer_lost(self, peer: Incarnation, why: str) -> None:
        """Requests bound for the peer fail; their posted writes end on their own."""
        if not self.links.remove(peer):
            return
        self.counters["peers_lost"] += 1
        self._early.forget(peer)
        for req in self.unfinished():
            if req.peer == peer:
                self._fail(req, FailureKind.PEER_LOST, why)

    # ------------------------------------------------------------ steps

    def _advance(self) -> None:
        """Nothing moves without a forward pass: pages are taken when a prompt is selected."""

    def _select(self) -> list[tuple[PrefillReq, Row]]:
        self._admit()
        reqs, budget = self.prefilling.snapshot(), self.settings.chunk_size
        rows = next_chunks(reqs, budget, self.kv, self._lora.slot_of)
        for req, row in rows:
            if row.init is not None:  # it may begin behind more than was cached at admission
                self._post(req, len(req.chain), None)
        return rows

    def _admit(self) -> None:
        """In rank order; one that does not fit holds back those behind it, so that it cannot
        starve. One that waits for its adapter or its grammar is passed over."""
        for req in self.waiting_queue.snapshot():
            if not self._slots.any_free:
                return
            if not (self._lora.admit(req) and self._lora.ready(req) and self._grammars.ready(req)):
                continue
            num_cached = self.kv.admit(req, req.num_tokens, reuse=req.reads_cache)
            if num_cached is None:
                return
            self._slots.give(req)
            self.prefilling.take(req)
            req.start_behind(num_cached)
            self._post(req, len(req.chain), None)
            self._lora.starts(req)
            self._mark(req, "queue")

    def _on_computed(self, req: PrefillReq, row: Row, sample: Sample | None) -> None:
        req.num_computed += len(row.token_ids)
        self.kv.publish(req, req.num_computed)
        if sample is None:
            self._post(req, req.num_computed // self.settings.page_size, None)
            return
        self._mark(req, "prefill")
        num_pages = self.kv.pages_for(req.num_tokens)
        req.output_ids.append(sample.token_id)
        req.finished = req.stop_reason()
        self._emit(req, sample.logprob)
        self._slots.take_back(req)
        self.inflight_queue.take(req)
        if req.finished is None:
            last = FirstToken(
                total_chunks=req.num_chunks + 1, token_id=sample.token_id, logprob=sample.logprob
            )
            self._post(req, num_pages, last)
        self._end_if_drained(req)

    # ------------------------------------------------------------ writes

    def _post(self, req: PrefillReq, upto_page: int, last: FirstToken | None) -> None:
        """Write the pages completed since the last write."""
        if upto_page <= req.pages_written:
            return
        settings = self.settings
        write = next_write(req, upto_page, last, settings.incarnation, settings.weight_version)
        self._outbox.transfer(write)
        req.posted.add(req.num_chunks)
        req.num_chunks += 1
        req.pages_written = upto_page

    def _on_write_ended(self, room: Room, chunk: int, error: str | None) -> None:
        req = self._reqs.get(room)
        if req is None or chunk not in req.posted:
            self.counters["unexpected_transfer_events"] += 1
            return
        req.posted.discard(chunk)
        if error is None:
            req.landed.append(chunk)
        elif req not in self.aborting_queue:
            self._fail(req, FailureKind.TRANSFER, error)
            return
        self._end_if_drained(req)

    def _end_if_drained(self, req: PrefillReq) -> None:
        """The one exit of requests whose pages were posted."""
        if req.posted:
            return
        if req in self.aborting_queue:
            self._retire_failed(req)
            return
        if req not in self.inflight_queue:
            return
        if req.finished is not None:
            self.links.send(req.peer, RoomFinished(req.room))
        self._mark(req, "transfer")
        self.ledger.ended(req, "finished" if req.finished is not None else "handed over")
        kind = Ending.DONE if req.finished is None else Ending.FIRST_TOKEN
        self._retire(req, Tombstone(kind, frozenset(req.landed)))

    # ------------------------------------------------------------ ends

    def _say_goodbye(self) -> None:
        for peer in self.links.linked():
            self.links.send(peer, PeerBye())

    def _retractable(self) -> Iterable[PrefillReq]:
        return (*self.prefilling, *self.inflight_queue)

    def _slot_holders(self) -> Iterable[PrefillReq]:
        return self.prefilling

    def _let_go(self, req: PrefillReq, kind: FailureKind, message: str) -> None:
        req.failure = (kind, message)
        if req.posted:
            self.aborting_queue.take(req)
        else:
            self._retire_failed(req)

    def _retire_failed(self, req: PrefillReq) -> None:
        assert req.failure is not None
        kind, message = req.failure
        landed = sorted(req.landed)
        if req.cancelled:
            self.links.send(req.peer, Drained(room=req.room, landed=landed))
        elif req.peer:
            failed = RoomFailed(room=req.room, kind=kind, message=message, landed=landed)
            self.links.send(req.peer, failed)
        stone = Tombstone(Ending.FAILED, frozenset(landed), kind, message)
        self._retire(req, stone)

    def _expire(self) -> None:
        for early in self._early.take_expired(self._now):
            room, message = early.destination.room, "no request came for this destination"
            stone = Tombstone(Ending.FAILED, kind=FailureKind.EXPIRED, message=message)
            self._tombstones.add(room, stone, self._now)
            self._repeat_ending(early.peer, room)
        for req in self.bootstrap_queue.snapshot():
            if req.twin_deadline <= self._now:
                self._fail(req, FailureKind.EXPIRED, "no destination came from decode")

    def _queued_tokens(self) -> int:
        waiting = (*self.bootstrap_queue, *self.waiting_queue, *self.prefilling)
        return sum(req.remaining for req in waiting)

    def check_invariants(self) -> None:
        super().check_invariants()
        for req in self._reqs.values():
            if req.posted and not req.pages:
                raise AssertionError(f"{req.rid} has writes under way and no pages")
            if req in self.aborting_queue and not req.posted:
                raise AssertionError(f"{req.rid} waits for a write that is not posted")
        both = self._reqs.keys() & self._early.rooms
        if both:
            raise AssertionError(f"destinations of {both} were not bound")
