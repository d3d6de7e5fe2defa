"""The faults that the design excludes, planted one by one: each must be noticed."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from common.kv_cache.page_pool import PageLeak
from common.lifecycle import IllegalTransition
from common.messages import (
    FailureKind,
    Incarnation,
    Retracted,
    Room,
    RoomFailed,
    TokenLogprob,
    TokenOutput,
)
from common.modes import PauseMode
from common.plan import Notified, Row
from common.scheduler import Scheduler
from common.slots import SlotLeak
from decode_node.prefill_side import PrefillSide
from decode_node.request import DecodeReq
from decode_node.scheduler import DecodeScheduler
from prefill_node.request import PrefillReq
from prefill_node.scheduler import PrefillScheduler
from router.dispatcher import Dispatcher
from router.picking import Pair
from router.requests import Attempt, Job
from tests.unit.scheduler import test_decode, test_drain, test_local_prefill, test_prefill
from tests.unit.scheduler.fabric import Fabric, PostedPiece
from tests.unit.scheduler.real_router import RealRouter
from tests.unit.scheduler.test_fuzz import run
from transfer.pieces import PieceGatherer, read

NOTICED = (
    AssertionError,
    IllegalTransition,
    PageLeak,
    KeyError,
    IndexError,
    AttributeError,
    SlotLeak,
)


def fuzz(seeds: int = 150) -> None:
    for seed in range(seeds):
        run(seed)


def fuzz_with_the_real_router() -> None:
    for seed in range(20):
        run(seed, router=RealRouter)


Plant = Callable[[pytest.MonkeyPatch], None]


def running_batch_on_prefill(patch: pytest.MonkeyPatch) -> None:
    original = PrefillScheduler._on_computed

    def planted(self: PrefillScheduler, req: PrefillReq, row: Row, sample: Any) -> None:
        original(self, req, row, sample)
        self.running_batch.append(req)  # type: ignore[attr-defined]

    patch.setattr(PrefillScheduler, "_on_computed", planted)


def page_freed_while_posted(patch: pytest.MonkeyPatch) -> None:
    def planted(self: PrefillScheduler, req: PrefillReq, kind: FailureKind, message: str) -> None:
        req.failure = (kind, message)
        self._retire_failed(req)

    patch.setattr(PrefillScheduler, "_let_go", planted)


def failed_while_a_sibling_is_posted(patch: pytest.MonkeyPatch) -> None:
    original = PrefillScheduler._let_go

    def planted(self: PrefillScheduler, req: PrefillReq, kind: FailureKind, message: str) -> None:
        failed = RoomFailed(room=req.room, kind=kind, message=message)
        self.links.send(req.peer, failed)
        original(self, req, kind, message)

    patch.setattr(PrefillScheduler, "_let_go", planted)


def decode_frees_at_once(patch: pytest.MonkeyPatch) -> None:
    original = DecodeScheduler._let_go

    def planted(self: DecodeScheduler, req: DecodeReq, kind: FailureKind, message: str) -> None:
        req.drained = True
        original(self, req, kind, message)

    patch.setattr(DecodeScheduler, "_let_go", planted)


def stale_incarnation_accepted(patch: pytest.MonkeyPatch) -> None:
    def planted(self: PrefillSide, room: Room, peer: Incarnation) -> DecodeReq | None:
        return self._reqs.get(room)

    patch.setattr(PrefillSide, "room_of", planted)


def attempts_confused(patch: pytest.MonkeyPatch) -> None:
    original = PrefillScheduler._on_write_ended

    def planted(self: PrefillScheduler, room: Room, chunk: int, error: str | None) -> None:
        rid = self._reqs[room].rid if room in self._reqs else ""
        newest = max((r for r in self._reqs.values() if r.rid == rid), key=lambda r: r.attempt)
        original(self, newest.room, chunk, error)

    patch.setattr(PrefillScheduler, "_on_write_ended", planted)


def token_zero_not_repeated(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._emit

    def planted(self: Any, req: Any, logprob: TokenLogprob | None, *, repeat: bool = False) -> None:
        if not repeat:
            original(self, req, logprob)

    patch.setattr(Scheduler, "_emit", planted)


def early_destination_dropped(patch: pytest.MonkeyPatch) -> None:
    original = PrefillScheduler._on_destination

    def planted(self: PrefillScheduler, peer: Incarnation, destination: Any) -> None:
        if destination.room in self._reqs:
            original(self, peer, destination)

    patch.setattr(PrefillScheduler, "_on_destination", planted)


def token_emitted_twice(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._emit

    def planted(self: Any, req: Any, logprob: TokenLogprob | None, *, repeat: bool = False) -> None:
        original(self, req, logprob, repeat=repeat)
        if req.attempt > 1 and not repeat:
            req.output_ids.append(req.output_ids[-1])

    patch.setattr(Scheduler, "_emit", planted)


def router_takes_repeated_tokens(patch: pytest.MonkeyPatch) -> None:
    original = Dispatcher._take_in

    def planted(
        self: Dispatcher, node: str, output: TokenOutput, job: Job, attempt: Attempt, now: float
    ) -> None:
        again = msgspec.structs.replace(output, index=len(job.output_ids))
        original(self, node, again, job, attempt, now)

    patch.setattr(Dispatcher, "_take_in", planted)


def router_forgets_what_was_emitted(patch: pytest.MonkeyPatch) -> None:
    original = Dispatcher._start

    def planted(self: Dispatcher, job: Job, pair: Pair, now: float) -> None:
        job.output_ids.clear()
        original(self, job, pair, now)

    patch.setattr(Dispatcher, "_start", planted)


def node_ends_while_a_transfer_touches_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "is_empty", property(lambda self: not self.unfinished()))


def drained_requests_are_dropped(patch: pytest.MonkeyPatch) -> None:
    def planted(self: Any, req: Any) -> None:
        answer = None if self.leave.under_way else Retracted(req.room)
        self._stop(req, answer, FailureKind.REFUSED, "retracted")

    patch.setattr(Scheduler, "_retract", planted)


def goodbye_before_the_writes_have_ended(patch: pytest.MonkeyPatch) -> None:
    original = PrefillScheduler._advance

    def planted(self: PrefillScheduler) -> None:
        original(self)
        if self.leave.under_way:
            self._say_goodbye()

    patch.setattr(PrefillScheduler, "_advance", planted)


def a_position_of_a_local_prompt_is_skipped(patch: pytest.MonkeyPatch) -> None:
    original = DecodeScheduler._on_computed

    def planted(self: DecodeScheduler, req: DecodeReq, row: Row, sample: Any) -> None:
        original(self, req, row, sample)
        if req in self.prefilling and req.num_uncomputed > 1:
            req.num_computed += 1

    patch.setattr(DecodeScheduler, "_on_computed", planted)


def a_local_prompt_is_kept_through_a_pause_that_empties_the_node(
    patch: pytest.MonkeyPatch,
) -> None:
    original = DecodeScheduler._retractable

    def planted(self: DecodeScheduler) -> Any:
        return tuple(req for req in original(self) if req not in self.prefilling)

    patch.setattr(DecodeScheduler, "_retractable", planted)


def a_stopped_local_prompt_keeps_its_slot(patch: pytest.MonkeyPatch) -> None:
    original = DecodeScheduler._let_go

    def planted(self: DecodeScheduler, req: DecodeReq, kind: FailureKind, message: str) -> None:
        if req in self.prefilling:
            self._slots.give(req)
            req.slot = None
        original(self, req, kind, message)

    patch.setattr(DecodeScheduler, "_let_go", planted)


def half_a_landing_is_one(patch: pytest.MonkeyPatch) -> None:
    """A room is taken for landed when one of two ranks has its heads."""

    def planted(self: PieceGatherer, payload: bytes) -> list[Notified]:
        piece = read(payload)
        return [Notified(payload if piece is None else piece.notification)]

    patch.setattr(PieceGatherer, "take", planted)


def a_write_ends_with_its_first_piece(patch: pytest.MonkeyPatch) -> None:
    """Its source pages are given away while another rank still reads its heads of them."""
    original = Fabric._end

    def planted(self: Fabric, posted: PostedPiece, error: str | None) -> None:
        posted.fate.num_open = 1
        original(self, posted, error)

    patch.setattr(Fabric, "_end", planted)


def retract_pause_in_mid_prefill() -> None:
    test_local_prefill.test_while_paused_no_chunk_is_computed(PauseMode.RETRACT)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (node_ends_while_a_transfer_touches_it, fuzz),
        (
            drained_requests_are_dropped,
            test_drain.test_after_the_bound_it_hands_over_what_it_computes_and_waits_for_its_writes,
        ),
        (goodbye_before_the_writes_have_ended, fuzz),
        (running_batch_on_prefill, fuzz),
        (a_position_of_a_local_prompt_is_skipped, fuzz),
        (
            a_local_prompt_is_kept_through_a_pause_that_empties_the_node,
            retract_pause_in_mid_prefill,
        ),
        (a_stopped_local_prompt_keeps_its_slot, fuzz),
        (half_a_landing_is_one, fuzz),
        (a_write_ends_with_its_first_piece, fuzz),
        (page_freed_while_posted, fuzz),
        (failed_while_a_sibling_is_posted, fuzz),
        (decode_frees_at_once, fuzz),
        (token_zero_not_repeated, test_decode.test_prefill_may_die_right_after_its_last_write),
        (token_emitted_twice, fuzz),
        (router_takes_repeated_tokens, fuzz_with_the_real_router),
        (router_forgets_what_was_emitted, fuzz_with_the_real_router),
        (
            stale_incarnation_accepted,
            test_decode.test_a_notification_of_another_incarnation_counts_for_nothing,
        ),
        (
            attempts_confused,
            test_prefill.test_attempt_two_is_not_touched_by_attempt_ones_event,
        ),
        (
            early_destination_dropped,
            test_prefill.test_a_destination_may_come_before_its_request,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, check: Callable[[], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(NOTICED):
        check()
