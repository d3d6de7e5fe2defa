"""When pages that a lost prefill may still write into come home, and when they must not."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from common.events import FromPeer, PeerClosed, PeerProbed, Reach
from common.messages import (
    Cancel,
    Destination,
    Drained,
    Failed,
    FailureKind,
    PeerGone,
    PeerRefused,
    PeerWelcome,
    RoomFailed,
    Sync,
)
from common.plan import DialPeer, ExpectWrites, HangUp, ProbePeer
from decode_node.quarantine import SETTLE_S
from decode_node.scheduler import DecodeScheduler
from tests.unit.scheduler.harness import Driven, decode, generate, landed
from tests.unit.scheduler.node_settings import FINGERPRINT, LEASE_S, POST_S, STOPPED_S, UNPROVEN_S

WELCOME = PeerWelcome(fingerprint=FINGERPRINT)


class Lossy(Driven):
    """A decode node whose request 1 is being transferred from `p` over link 1."""

    def __init__(self, num_pages: int = 24) -> None:
        super().__init__(decode(num_pages).scheduler)
        assert isinstance(self.scheduler, DecodeScheduler)
        self.decode = self.scheduler
        self.router(generate(1))
        self.turn()
        self.peer(WELCOME, "p")
        self.turn()
        assert [sent.room for sent in self.said(Destination)] == [1]
        self.asked: list[Any] = []

    def turn(self, now: float | None = None) -> None:
        self.now = self.now if now is None else now
        plan = self.step()
        kinds = (DialPeer, HangUp, ProbePeer)
        self.asked = [message for message in plan.messages if isinstance(message, kinds)]

    def event(self, event: FromPeer | PeerClosed | PeerProbed) -> None:
        self.scheduler.handle(event, self.now)
        self.turn()

    def closed(self, link: int = 1, silent_s: float | None = 0.0, gone: bool = False) -> None:
        self.event(PeerClosed("p", link, "silent", silent_s=silent_s, gone=gone))

    @property
    def set_aside(self) -> int:
        return self.scheduler.kv.num_quarantined

    def counted(self, name: str) -> int:
        return self.scheduler.counters[name]


def test_a_lost_link_fails_its_requests_and_asks_the_peers_kernel_at_once() -> None:
    node = Lossy()
    node.closed()
    assert [answer.kind for answer in node.said(Failed)] == [FailureKind.PEER_LOST]
    assert (node.set_aside, node.asked) == (2, [ProbePeer("p", "tcp://p")])
    node.turn(1.0)
    assert node.asked == [], "one question at a time"


def test_no_clock_runs_before_the_link_is_closed() -> None:
    """Until then the I/O thread may echo pings, and each renews prefill's lease."""
    node = Lossy()
    node.router(PeerGone("p"))
    node.turn()
    assert node.asked == [HangUp("p", 1)]
    node.turn(10 * STOPPED_S)
    assert (node.set_aside, node.asked) == (2, [])
    node.closed()
    assert node.asked == [ProbePeer("p", "tcp://p")]


def test_the_end_of_the_process_frees_its_pages_after_they_have_settled() -> None:
    node = Lossy()
    node.closed()
    node.event(PeerProbed("p", Reach.GONE))
    assert node.sent(ExpectWrites)[-1].on, "what is in our buffers is taken in"
    node.turn(SETTLE_S - 0.1)
    assert node.set_aside == 2
    node.turn(SETTLE_S)
    assert (node.set_aside, node.counted("quarantine_gone")) == (0, 1)
    node.turn()
    assert not node.sent(ExpectWrites)[-1].on


def test_what_the_io_thread_knows_of_the_end_needs_no_probe() -> None:
    node = Lossy()
    node.closed(gone=True)
    assert node.asked == []
    node.turn(SETTLE_S)
    assert node.set_aside == 0


def test_after_an_outage_a_dead_peers_kernel_may_repeat_for_as_long_as_it_lasted() -> None:
    node = Lossy()
    node.closed(silent_s=5.0)
    node.turn(7.0)
    node.event(PeerProbed("p", Reach.GONE))
    node.turn(18.9)
    assert node.set_aside == 2
    node.turn(19.0)  # 12 s after 12 s of silence
    assert node.set_aside == 0


def test_a_lost_peer_is_dialled_though_no_request_wants_it_and_drains_by_its_own_word() -> None:
    node = Lossy()
    node.closed()
    node.event(PeerProbed("p", Reach.LISTENING))
    assert node.asked == [DialPeer("p", "tcp://p", 2)]
    node.turn(1.5 * UNPROVEN_S)
    node.event(FromPeer("p", 2, WELCOME))
    assert node.said(Sync)[-1] == Sync(open=[], cancelling=[1])
    node.event(FromPeer("another", 2, Drained(room=1)))
    assert node.set_aside == 2
    node.event(FromPeer("p", 2, Drained(room=1, landed=[0])))
    assert (node.set_aside, node.counted("quarantine_drained")) == (0, 1)


def test_a_stopped_process_keeps_its_pages_for_as_long_as_it_is_believed_in() -> None:
    node = Lossy()
    node.closed()
    node.event(PeerProbed("p", Reach.LISTENING))
    node.closed(2, silent_s=None)
    node.turn(STOPPED_S - 1)
    assert node.set_aside == 2
    node.turn(STOPPED_S)
    assert (node.set_aside, node.counted("quarantine_stopped")) == (0, 1)


def test_a_peer_that_cannot_be_reached_is_waited_for_longer_than_its_lease() -> None:
    node = Lossy()
    node.closed()
    node.event(PeerProbed("p", Reach.UNREACHABLE))
    node.turn(LEASE_S + POST_S + 10)
    assert node.set_aside == 2
    node.turn(UNPROVEN_S)
    assert (node.set_aside, node.counted("quarantine_expired")) == (0, 1)


def test_a_host_that_dies_under_a_stopped_process_counts_from_its_last_sign_of_life() -> None:
    node = Lossy()
    node.closed()
    node.turn(50.0)
    node.event(PeerProbed("p", Reach.LISTENING))
    node.closed(2, silent_s=None)
    node.event(PeerProbed("p", Reach.UNREACHABLE))
    node.turn(50.0 + UNPROVEN_S - 0.1)
    assert node.set_aside == 2
    node.turn(50.0 + UNPROVEN_S)
    assert node.set_aside == 0


def test_pages_without_proof_are_given_away_last() -> None:
    node = Lossy(num_pages=4)
    suspect = set(node.scheduler._reqs[1].pages)
    node.closed()
    node.event(PeerProbed("p", Reach.UNREACHABLE))
    node.turn(UNPROVEN_S)
    assert node.scheduler.kv.num_free == 4
    node.router(generate(2, prefill_incarnation="q"))
    node.turn()
    node.event(FromPeer("q", 3, WELCOME))
    assert suspect.isdisjoint(node.scheduler._reqs[2].pages)


def test_reconnecting_is_tried_less_and_less_often() -> None:
    node = Lossy()
    node.closed()
    tried = []
    link = 1
    while node.set_aside:
        if node.asked and isinstance(node.asked[0], ProbePeer):
            tried.append(node.now)
            node.event(PeerProbed("p", Reach.LISTENING))
            link += 1
            assert node.asked == [DialPeer("p", "tcp://p", link)]
            node.closed(link, silent_s=None)
        node.turn(node.now + 0.25)
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert gaps == sorted(gaps)
    assert 5 <= len(tried) <= 10


def test_what_a_link_says_after_its_end_counts_for_nothing() -> None:
    node = Lossy()
    node.closed()
    node.event(PeerProbed("p", Reach.LISTENING))
    node.event(FromPeer("p", 2, WELCOME))
    node.router(generate(2))
    node.turn()
    late: list[FromPeer | PeerClosed] = [
        FromPeer("p", 1, PeerRefused(reason="late")),
        FromPeer("p", 1, RoomFailed(room=2, kind=FailureKind.TRANSFER, message="late")),
        PeerClosed("p", 1, "late"),
    ]
    for event in late:
        node.event(event)
    assert node.decode.links.ready("p")
    assert [answer.room for answer in node.said(Failed)] == [1]
    assert node.counted("stale_messages") == len(late)


def test_a_closing_link_is_not_dialled_anew_before_it_is_closed() -> None:
    node = Lossy()
    node.event(FromPeer("p", 1, PeerRefused(reason="not linked")))
    node.router(generate(2))
    node.turn()
    assert node.asked == []
    node.closed()
    assert DialPeer("p", "tcp://p", 2) in node.asked


def test_weights_that_changed_in_mid_transfer_are_refused_also_by_decode() -> None:
    node = Lossy()
    node.fact(landed(1, weight_version="another"))
    node.turn()
    (failed,) = node.said(Failed)
    assert "weights changed" in failed.message
    assert node.said(Cancel) == [Cancel(1)], "its pages wait for prefill's word"


def test_a_late_notification_for_pages_set_aside_disturbs_nobody() -> None:
    node = Lossy()
    pages = list(node.scheduler._reqs[1].pages)
    node.closed()
    node.fact(landed(1, pages=pages))
    node.turn()
    assert (node.counted("late_writes"), node.counted("stray_writes")) == (1, 0)


@pytest.mark.parametrize("spoil", [lambda n: n.closed(), lambda n: n.closed(gone=True)])
def test_a_word_from_the_peer_itself_outweighs_what_others_say(
    spoil: Callable[[Lossy], None],
) -> None:
    """A firewall that rejects connections makes a living process look gone."""
    node = Lossy()
    spoil(node)
    node.router(generate(2))
    node.turn()
    node.event(FromPeer("p", 2, WELCOME))
    node.event(PeerProbed("p", Reach.LISTENING))
    node.turn(10 * STOPPED_S)
    assert node.set_aside == 2
