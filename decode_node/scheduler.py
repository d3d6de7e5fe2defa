"""The decode node's scheduler: KV pages in, tokens out.

    Generate ─▶ prealloc ─(link, pages)─▶ transfer ─(all chunks)─▶ waiting ─(slot)─▶ running ─▶ end
                   │                         │  └─▶ aborting ─▶ end   │                │
                   ├────── end ◀─────────────┴────────────────────────┴── retracted ◀──┤
                   └─(no prefill node: pages, slot)─▶ prefilling ─(computed here)──────┘

* Pages are taken with a reserve for what already runs, and only for a request that will find a slot
  when its KV lands. The first may be cached ones; `Destination` names the others to prefill.
* All full pages are published once the room has landed, then page by page as tokens are computed:
  the next turn of a conversation finds its past here.
* From that moment until the room's last chunk has landed, prefill may write into them. A request
  stopped in between goes through ABORTING and leaves it on prefill's word (`Drained`, `RoomFailed`,
  `RoomFinished`). If prefill is lost, the pages go into `quarantine` until there is other proof.
* Retraction is per request: `_retract(req)`. There is no retraction of a batch, so an empty batch
  has nothing that could be retracted. Under memory pressure the last in rank (the least urgent,
  the youngest of those) goes first, never the first of all.
* A request that names no prefill node is computed here, beside the running batch: `local_prefill`.
* The first token is repeated to the router as soon as everything has landed: from then on
  prefill's death does not matter.
"""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from common.events import FromPeer, PeerClosed, PeerProbed
from common.lifecycle import DECODE_EDGES, State
from common.messages import (
    Cancel,
    ChunkLanded,
    FailureKind,
    Generate,
    Incarnation,
    NodeStats,
    PeerNode,
)
from common.plan import Notified, PeerAdded, PieceLanded, Row, Sample, WriteDone, WriteFailed
from common.scheduler import Scheduler
from common.settings import SchedulerSettings
from common.tombstones import Ending, Tombstone
from decode_node.admission import choose_victim, has_room, pages_to_go_on
from decode_node.announced import AnnouncedPeers
from decode_node.forecast import SlotForecast
from decode_node.local_prefill import LocalPrefill
from decode_node.notification import read_notification
from decode_node.peers import PrefillLinks
from decode_node.prefill_side import PrefillSide
from decode_node.quarantine import Quarantine
from decode_node.request import DecodeReq


class DecodeScheduler(Scheduler[DecodeReq]):
    """Scheduler subclass for `DisaggregationMode.DECODE`."""

    _WITHOUT_PAGES = (State.PREALLOC,)
    _NOT_COMPUTED = (State.PREALLOC, State.TRANSFER, State.WAITING)

    def __init__(
        self, settings: SchedulerSettings, reserve_pages: int = 8, local_chunk_size: int = 64
    ) -> None:
        super().__init__(settings, DECODE_EDGES)
        self.prealloc_queue = self.queues[State.PREALLOC]
        self.transfer_queue = self.queues[State.TRANSFER]
        self.waiting_queue = self.queues[State.WAITING]
        self.prefilling = self.queues[State.PREFILLING]
        self.running_queue = self.queues[State.RUNNING]
        self.aborting_queue = self.queues[State.ABORTING]
        self.links = PrefillLinks(self._outbox)
        self._announced = AnnouncedPeers(self.links, settings.sync_s)
        self.quarantine = Quarantine(self.kv, self.links, self._outbox, self.counters, settings)
        self._reserve_pages = reserve_pages
        self._forecast = SlotForecast(settings.max_running_requests)
        self._local = LocalPrefill(
            self.prefilling, self.kv, beside=local_chunk_size, alone=settings.chunk_size
        )
        self._prefill = PrefillSide(
            settings,
            self.kv,
            self.links,
            self.quarantine,
            self.queues,
            self._reqs,
            self._tombstones,
            self.ledger,
            fail=self._fail,
            retire=self._retire,
        )

    @property
    def running_batch(self) -> Collection[DecodeReq]:
        return self.running_queue.snapshot()

    # ------------------------------------------------------------ new requests

    def _new_request(self, generate: Generate, router: Incarnation) -> DecodeReq:
        return DecodeReq(**DecodeReq.fields_of(generate, router, self._now))

    def _pages_needed(self, req: DecodeReq) -> int:
        return self.kv.pages_for(req.max_kv_tokens)

    def _accept(self, req: DecodeReq) -> None:
        self.prealloc_queue.take(req)

    def _advance(self) -> None:
        """Dial, take pages, name them to prefill. Nothing computed before a pause may survive it,
        so under a pause that empties the node no pages are taken."""
        self._announced.tend(self._now, self._prefill.is_needed)
        blocked = self.paused is not None and self.paused.empties_node
        for req in self.prealloc_queue.snapshot():
            reachable = req.is_local or self.links.want(req.prefill, req.prefill_address)
            if reachable and not blocked:
                blocked = not self._preallocate(req)
        arriving = bool(self.transfer_queue or self.aborting_queue)
        self._outbox.expect_writes(arriving or self.quarantine.settling)
        self._prefill.sync(self._now)

    def _on_peers(self, router: Incarnation, nodes: Sequence[PeerNode] | None) -> None:
        self._announced.announce(router, nodes)

    def _preallocate(self, req: DecodeReq) -> bool:
        """Take its pages and name them to prefill, or compute them here; False if that has to
        wait, and so do those behind it. One that waits for its adapter or its grammar is passed
        over."""
        if not self._grammars.ready(req):
            return True
        if not self._lora.admit(req) or (req.is_local and not self._lora.ready(req)):
            return True
        active = tuple(self._retractable())
        if not self._forecast.slot_awaits(sum(not self._prefill.is_held_up(r) for r in active)):
            return False
        if req.is_local and self._slots.num_free <= len(self.waiting_queue):
            return False  # the free slots are theirs whose KV is here already
        reuse = req.reads_cache or not req.is_local
        need = self.kv.pages_to_admit(req, req.num_tokens, reuse=reuse)
        grows = self._pages_needed(req) - self.kv.pages_for(req.num_tokens)
        others = [self._pages_needed(r) - len(r.pages) for r in active]
        if not has_room(need, grows, others, self.kv.num_free, self._reserve_pages):
            return False
        num_cached = self.kv.admit(req, req.num_tokens, reuse=reuse)
        assert num_cached is not None
        if req.is_local:
            req.start_behind(num_cached)
            self._slots.give(req)
            self.prefilling.take(req)
            self._lora.starts(req)
            self._mark(req, "queue")
            return True
        self.transfer_queue.take(req)
        self._lora.entered(req)
        req.first_page = len(req.chain)
        req.deadline = self._now + self.settings.transfer_timeout_s
        self._mark(req, "queue")
        self._prefill.send_destination(req)
        return True

    def _on_peer_event(self, event: FromPeer | PeerClosed | PeerProbed) -> None:
        self._prefill.on_event(event, self._now)

    def _on_peer_lost(self, peer: Incarnation, why: str) -> None:
        self._prefill.on_lost(peer, why, self._now)

    # ------------------------------------------------------------ what lands

    def _on_transfer_event(
        self, event: PeerAdded | WriteDone | WriteFailed | Notified | PieceLanded
    ) -> None:
        if isinstance(event, Notified | PieceLanded):
            self._on_landed(event)
        else:
            self.counters["stale_messages"] += 1

    def _on_landed(self, event: Notified | PieceLanded) -> None:
        """A room's chunk is here, or a piece of it; what is after a room's end is stray, whole or
        not, since its bytes are in place."""
        chunk = read_notification(event.payload, self.settings.vocab_size)
        if chunk is None:
            self.counters["garbage_notifications"] += 1
            return
        if chunk.target != self.settings.incarnation:
            self.counters["stale_messages"] += 1
            return
        req = self._prefill.room_of(chunk.room, chunk.source)
        if req is not None and req in self.aborting_queue:
            return
        stone = self._tombstones.get(chunk.room)
        if req is not None and req in self.transfer_queue:
            if isinstance(event, Notified):
                self._on_chunk(req, chunk)
        elif self.kv.in_quarantine(chunk.room) or (stone and chunk.chunk in stone.landed):
            self.counters["late_writes"] += 1
        else:
            self._on_stray_write(chunk)

    def _on_chunk(self, req: DecodeReq, chunk: ChunkLanded) -> None:
        if chunk.weight_version != self.settings.weight_version:
            self._fail(req, FailureKind.TRANSFER, "the weights changed in mid-transfer")
            return
        req.landed.add(chunk.chunk)
        req.first_token = chunk.last or req.first_token
        first = req.first_token
        if first is None or len(req.landed) < first.total_chunks:
            return
        self.waiting_queue.take(req)
        self._mark(req, "transfer")
        self._forecast.note_landing(req.stages["transfer"] - req.stages["queue"])
        self.kv.publish(req, req.num_tokens)
        req.output_ids.append(first.token_id)
        self._emit(req, first.logprob, repeat=True)

    def _on_stray_write(self, chunk: ChunkLanded) -> None:
        """A write came after its room's end, into pages that may have new owners: retract them, and
        forget what was cached there, with all that builds on it."""
        self.counters["stray_writes"] += 1
        touched = frozenset(chunk.pages)
        self.counters["cache_doubtful_pages"] += self.kv.forget_pages(touched)
        for req in self.unfinished():
            if not touched.isdisjoint(req.pages):
                self._retract(req)

    # ------------------------------------------------------------ steps

    def _select(self) -> list[tuple[DecodeReq, Row]]:
        if self._flight and self._is_short_of_pages():
            return []  # who is retracted gives nothing back before the step in flight is taken in
        for req in self.waiting_queue.snapshot():
            if not self._slots.any_free:
                break
            if not self._lora.ready(req):
                continue
            self._slots.give(req)
            self.running_queue.take(req)
            self._lora.starts(req)
            req.unsent_pages = list(req.pages)
            self._mark(req, "waiting")
        going_on = [r for r in self.running_queue.snapshot() if not r.draws_its_last]
        ready = [req for req in going_on if self._make_room(req)]
        running = [req for req in ready if req in self.running_queue]
        slot_of = self._lora.slot_of
        rows = [(req, req.next_row(slot_of(req))) for req in running]
        return rows + self._local.rows(slot_of, anybody_runs=bool(running))

    def _is_short_of_pages(self) -> bool:
        """Whether somebody would have to be retracted for the next step."""
        reqs = (*self.running_queue, *self.waiting_queue)
        return pages_to_go_on(reqs, self.kv.pages_for) > self.kv.num_free

    def _make_room(self, req: DecodeReq) -> bool:
        """A page for the next token's KV, retracting the last in rank if need be; else False."""
        while req in self.running_queue:
            pages = self.kv.grow(req, req.num_tokens + req.drawing)
            if pages is not None:
                req.unsent_pages += pages
                return True
            victim = choose_victim(self.queues)
            if victim is None:
                return False
            self._retract(victim)
        return False

    def _on_computed(self, req: DecodeReq, row: Row, sample: Sample | None) -> None:
        if req in self.prefilling:
            req.num_computed += len(row.token_ids)
            self.kv.publish(req, req.num_computed)
            self.counters["local_prefill_tokens"] += len(row.token_ids)
            if sample is None:
                return
            self._mark(req, "prefill")
            self.running_queue.take(req)
        else:
            self.kv.publish(req, req.num_tokens)
        assert sample is not None
        req.output_ids.append(sample.token_id)
        self._emit(req, sample.logprob)
        if req.stop_reason() is not None:
            self._forecast.note_end(self._now)
            self.ledger.ended(req, "finished")
            self._retire(req, Tombstone(Ending.DONE, frozenset(req.landed)))

    # ------------------------------------------------------------ ends

    def _say_goodbye(self) -> None:
        for peer in self.links.linked():
            self.links.close(peer)

    def stats(self) -> NodeStats:
        return msgspec.structs.replace(super().stats(), linked_peers=self.links.linked())

    def _retractable(self) -> Iterable[DecodeReq]:
        here = (*self.running_queue, *self.waiting_queue, *self.prefilling)
        return (*here, *self.transfer_queue)

    def _slot_holders(self) -> Iterable[DecodeReq]:
        """KV is made only for what will find its adapter when it lands."""
        arriving = (req for req in self.transfer_queue if not self._prefill.is_held_up(req))
        return (*self.running_queue, *self.waiting_queue, *self.prefilling, *arriving)

    def _let_go(self, req: DecodeReq, kind: FailureKind, message: str) -> None:
        if req.drained or req not in self.transfer_queue:
            self._retire(req, Tombstone(Ending.FAILED, frozenset(req.landed), kind, message))
        elif self.links.ready(req.prefill):
            self.aborting_queue.take(req)
            self.kv.release_hit(req)
            self.links.send(req.prefill, Cancel(req.room))
        else:
            self._prefill.set_aside(req)

    def _expire(self) -> None:
        self.quarantine.tick(self._now)
        for req in self.transfer_queue.snapshot():
            if req.deadline <= self._now and not self._prefill.is_held_up(req):
                kind = FailureKind.PEER_LOST if req.drained else FailureKind.TRANSFER
                self._fail(req, kind, "the KV did not arrive in time")

    def check_invariants(self) -> None:
        super().check_invariants()
        self.quarantine.check_invariants()
        self._local.check_invariants(self.kv.pages_for)
        for req in self.running_queue:
            if req.slot is None or len(req.pages) < self.kv.pages_for(req.num_tokens - 1):
                raise AssertionError(f"{req.rid} runs without a slot or without its pages")
