"""The prefill scheduler by itself: what it writes, what it holds, what it says."""

import msgspec
import pytest

from common.events import FromPeer, PeerClosed
from common.lifecycle import PREFILL_EDGES, IllegalTransition, ReqQueue, State
from common.messages import (
    Abort,
    Cancel,
    Drained,
    Failed,
    FailureKind,
    PeerBye,
    PeerRefused,
    Pong,
    RoomFailed,
    RoomFinished,
    RoomUnknown,
    SamplingParams,
    Sync,
    Tokens,
    ToPrefill,
    decode_notification,
)
from common.plan import (
    AddPeer,
    PeerAdded,
    RemovePeer,
    RenewLease,
    Row,
    ToPeerMsg,
    Write,
    WriteDone,
    WriteFailed,
)
from tests.unit.scheduler.harness import HELLO, Driven, destination, generate, prefill


def test_a_destination_may_come_before_its_request() -> None:
    node = prefill()
    node.peer(destination(1), "d")
    node.router(generate(1))
    node.step()
    node.step()
    assert [write.room for write in node.sent(Write)] == [1]


def test_complete_pages_travel_after_each_chunk_and_the_last_brings_the_token() -> None:
    node = prefill()  # pages of 4 tokens, chunks of 6
    node.router(generate(1, prompt=15))
    node.peer(destination(1, pages=4), "d")
    for _ in range(4):
        node.step(token=9)
    writes = node.sent(Write)
    assert [len(write.source_pages) for write in writes] == [1, 2, 1]
    assert [write.target_pages for write in writes] == [(0,), (1, 2), (3,)]
    notes = [decode_notification(write.notification) for write in writes]
    assert [note.chunk for note in notes] == [0, 1, 2]
    assert notes[0].last is None
    assert notes[2].last is not None
    assert (notes[2].last.total_chunks, notes[2].last.token_id) == (3, 9)
    assert [out.token_ids for tokens in node.said(Tokens) for out in tokens.outputs] == [[9]]


def test_what_was_sent_is_counted_and_timed() -> None:
    node = prefill()
    node.router(generate(1, prompt=6))
    node.peer(destination(1, pages=2), "d")
    for _ in range(2):
        node.step()
    node.fact(WriteDone(1, 0, 512, 0.25))
    assert node.scheduler.counters["transferred_bytes"] == 512
    assert node.scheduler.take_report().transferred == [(512, 0.25)]


def test_a_budget_is_shared_by_several_prompts() -> None:
    node = prefill()
    for room in (1, 2, 3):
        node.router(generate(room, prompt=2))
        node.peer(destination(room, pages=1), "d")
    batch = node.step().batch
    assert batch is not None
    assert [len(row.token_ids) for row in batch.rows] == [2, 2, 2]


def test_pages_on_decode_already_are_not_sent_again() -> None:
    node = prefill()
    node.router(generate(1, prompt=10))
    node.peer(msgspec.structs.replace(destination(1, pages=1, first=7), first_page=2), "d")
    for _ in range(3):
        node.step()
    (write,) = node.sent(Write)
    assert write.target_pages == (7,)
    assert len(write.source_pages) == 1


@pytest.mark.parametrize(("max_tokens", "stop"), [(1, ()), (8, (5,))])
def test_a_first_token_that_ends_the_request_never_reaches_decode(
    max_tokens: int, stop: tuple[int, ...]
) -> None:
    node = prefill()
    node.router(generate(1, prompt=10, max_tokens=max_tokens, stop=stop))
    node.peer(destination(1, pages=3), "d")
    node.step()
    node.step()
    node.step()
    (write,) = node.sent(Write)  # the first chunk's page was under way already
    assert not node.said(RoomFinished)
    node.fact(WriteDone(1, write.chunk, 1, 0.1))
    node.step()
    assert node.said(RoomFinished) == [RoomFinished(1)]
    assert node.scheduler.kv.num_free == 24


def test_cancel_is_answered_only_when_no_write_is_posted() -> None:
    node = posted(chunks=2)
    node.peer(Cancel(1), "d")
    node.step()
    assert not node.said(Drained)
    node.fact(WriteDone(1, 0, 1, 0.1))
    node.step()
    assert not node.said(Drained)
    node.fact(WriteFailed(1, 1, "late"))
    node.step()
    assert node.said(Drained) == [Drained(room=1, landed=[0])]
    assert node.scheduler.kv.num_free == 24


def posted(chunks: int) -> Driven:
    """A node whose request 1 has that many writes under way."""
    node = prefill()
    node.router(generate(1, prompt=6 * chunks))
    node.peer(destination(1, pages=node.scheduler.kv.pages_for(6 * chunks)), "d")
    for _ in range(chunks + 1):
        node.step()
    assert len(node.sent(Write)) == chunks
    return node


def test_failed_is_said_only_after_the_sibling_write_has_ended() -> None:
    node = posted(chunks=2)
    node.fact(WriteFailed(1, 0, "broken"))
    node.step()
    assert [answer.kind for answer in node.said(Failed)] == [FailureKind.TRANSFER]
    assert not node.said(RoomFailed)
    assert node.scheduler.kv.num_free < 24
    node.fact(WriteDone(1, 1, 1, 0.1))
    node.step()
    assert [failed.landed for failed in node.said(RoomFailed)] == [[1]]
    assert node.scheduler.kv.num_free == 24


def test_attempt_two_is_not_touched_by_attempt_ones_event() -> None:
    node = prefill(prefix_cache=False)
    for attempt in (1, 2):
        node.router(generate(attempt, rid="same", attempt=attempt))
        node.peer(destination(attempt), "d")
        node.step()
        node.step()
    first, second = node.scheduler._reqs[1], node.scheduler._reqs[2]
    assert first in node.scheduler.queues[State.ABORTING]
    node.fact(WriteDone(1, 0, 1, 0.1))
    assert second in node.scheduler.queues[State.INFLIGHT]
    assert second.posted == {0}


def test_a_lost_destination_is_asked_for_and_a_lost_ending_is_repeated() -> None:
    node = prefill()
    node.router(generate(1))
    node.peer(Sync(open=[1, 2], cancelling=[3]), "d")
    node.step()
    assert node.said(RoomUnknown) == [RoomUnknown(1), RoomUnknown(2)]
    assert node.said(Drained) == [Drained(room=3)]
    node.router(Abort(1))
    node.peer(Sync(open=[1], cancelling=[]), "d")
    node.step()
    assert [failed.room for failed in node.said(RoomFailed)] == [1]


def test_a_twin_that_never_comes_expires_unless_decode_still_waits_for_pages() -> None:
    node = prefill()
    node.router(generate(1))
    node.router(generate(2))
    node.peer(destination(3), "d")
    node.now = 7.0
    node.peer(Sync(open=[], cancelling=[], pending=[2]), "d")
    node.now = 9.0
    node.step()
    assert [(f.room, f.kind) for f in node.said(Failed)] == [(1, FailureKind.EXPIRED)]
    assert [(f.room, f.kind) for f in node.said(RoomFailed)] == [(3, FailureKind.EXPIRED)]


@pytest.mark.parametrize("pages", [[0], [0, 0], [0, 99], [-1, 0], [0, 1, 2]])
def test_a_wrong_destination_fails_its_request_alone(pages: list[int]) -> None:
    node = prefill()
    node.router(generate(1))
    node.router(generate(2))
    node.peer(msgspec.structs.replace(destination(1), pages=pages), "d")
    node.peer(destination(2), "d")
    node.step()
    node.step()
    assert [answer.room for answer in node.said(Failed)] == [1]
    assert [write.room for write in node.sent(Write)] == [2]


def test_another_weight_version_is_refused() -> None:
    node = prefill(weight_version="a")
    node.router(generate(1))
    node.peer(msgspec.structs.replace(destination(1), weight_version="b"), "d")
    node.step()
    assert "weight version" in node.said(Failed)[0].message


def test_a_handshake_that_differs_is_refused_by_field() -> None:
    node = prefill()
    other = msgspec.structs.replace(HELLO.fingerprint, page_size=64)
    node.peer(msgspec.structs.replace(HELLO, fingerprint=other), "other")
    node.step()
    (refused,) = node.said(PeerRefused)
    assert "page_size" in refused.reason


@pytest.mark.parametrize(
    ("heads", "word"),
    [
        ((), "0 ranks"),
        (((0, 1), (1, 1)), "hold 2 KV heads, not 1"),
        (((0, 1), (0, 2)), "not equal"),
    ],
)
def test_ranks_that_make_no_node_are_refused(heads: tuple[tuple[int, int], ...], word: str) -> None:
    node = prefill()
    memories = tuple(
        msgspec.structs.replace(
            HELLO.memories[0], agent_name=f"rank {rank}", first_head=first, num_heads=count
        )
        for rank, (first, count) in enumerate(heads)
    )
    node.peer(msgspec.structs.replace(HELLO, memories=memories), "other")
    node.step()
    (refused,) = node.said(PeerRefused)
    assert word in refused.reason
    assert [add.peer for add in node.sent(AddPeer)] == ["d"]


def test_a_decode_node_of_several_ranks_is_one_peer() -> None:
    node = prefill()
    memories = tuple(
        msgspec.structs.replace(HELLO.memories[0], agent_name=name) for name in ("one", "replica")
    )
    node.peer(msgspec.structs.replace(HELLO, memories=memories), "other")
    node.step()
    assert node.sent(AddPeer)[-1] == AddPeer("other", memories)


def test_a_lease_never_outlives_what_decode_has_echoed() -> None:
    node = prefill()
    node.now = 10.0
    node.peer(Pong(heard=8.0, lease_s=4.0), "d")
    node.peer(Pong(heard=500.0, lease_s=4.0), "d")
    node.step()
    assert [renewal.until for renewal in node.sent(RenewLease)] == [12.0, 14.0]


def test_a_lost_decode_fails_its_requests_and_pages_wait_for_the_write() -> None:
    node = posted(chunks=1)
    node.scheduler.handle(PeerClosed("d", 1, "silent"), 1.0)
    node.step()
    assert [answer.kind for answer in node.said(Failed)] == [FailureKind.PEER_LOST]
    assert node.scheduler.kv.num_free < 24
    node.fact(WriteFailed(1, 0, "the peer is gone"))
    node.step()
    assert node.scheduler.kv.num_free == 24


def test_what_can_never_run_is_refused_on_arrival() -> None:
    node = prefill(num_pages=3)
    node.router(generate(1, prompt=13))
    node.router(generate(2, prompt=0))
    node.router(generate(3, prompt=5, prompt_ids=[1, 97]))
    node.router(generate(4, prompt=5, max_tokens=400))
    node.step()
    kinds = [answer.kind for answer in node.said(Failed)]
    assert kinds == [FailureKind.TOO_LARGE] + [FailureKind.INVALID] * 3


def test_a_prefill_node_has_no_place_for_a_running_request() -> None:
    node = prefill()
    assert node.scheduler.running_batch == ()
    with pytest.raises(AttributeError):
        node.scheduler.running_batch = []  # type: ignore[misc]
    with pytest.raises(IllegalTransition):
        ReqQueue(State.RUNNING, PREFILL_EDGES)
    assert State.RUNNING not in node.scheduler.queues


def on_link(node: Driven, link: int, body: ToPrefill) -> None:
    node.scheduler.handle(FromPeer("d", link, body), node.now)
    node.step()


def test_a_woken_node_drains_on_the_next_link_what_it_had_posted_on_the_last() -> None:
    """It was stopped; decode has dialled it anew and wants the room's pages back."""
    node = posted(chunks=2)
    node.now = 100.0
    on_link(node, 2, msgspec.structs.replace(HELLO, link=2))
    assert [answer.kind for answer in node.said(Failed)] == [FailureKind.PEER_LOST]
    assert [type(c) for c in node.transfers[-2:]] == [RemovePeer, AddPeer], "and with it the lease"
    node.fact(PeerAdded("d"))
    on_link(node, 2, Sync(open=[], cancelling=[1]))
    node.fact(WriteFailed(1, 0, "the peer's lease is over"))
    node.step()
    assert not node.said(Drained), "one is posted still"
    node.fact(WriteDone(1, 1, 1, 0.1))
    plan = node.step()
    assert ToPeerMsg("d", 2, Drained(room=1, landed=[1])) in plan.messages
    assert node.scheduler.kv.num_free == 24
    on_link(node, 2, Sync(open=[], cancelling=[1]))
    assert node.said(Drained) == [Drained(room=1, landed=[1])] * 2


def test_what_an_older_link_says_counts_for_nothing() -> None:
    node = prefill()
    on_link(node, 2, msgspec.structs.replace(HELLO, link=2))
    node.fact(PeerAdded("d"))
    node.router(generate(1))
    on_link(node, 2, destination(1))
    for late in (PeerBye(), Cancel(1), Pong(heard=0.0, lease_s=99.0), HELLO):
        on_link(node, 1, late)
    node.scheduler.handle(PeerClosed("d", 1, "late"), node.now)
    node.step()
    assert [write.room for write in node.sent(Write)] == [1]
    assert node.said(RenewLease) == node.said(Drained) == []
    assert node.scheduler.counters["stale_messages"] == 4


def test_prompt_logprobs_of_all_chunks_leave_once_with_the_first_token() -> None:
    node = prefill()  # chunks of 6
    sampling = SamplingParams(max_tokens=8, seed=1, prompt_logprobs=2)
    node.router(generate(1, prompt=15, sampling=sampling))
    node.router(generate(2, prompt=1, sampling=sampling))
    node.router(generate(3, prompt=2))
    for room, pages in ((1, 4), (2, 1), (3, 1)):
        node.peer(destination(room, pages=pages), "d")
    rows: list[Row] = []
    for _ in range(5):
        batch = node.step().batch
        rows += [] if batch is None else batch.rows
    asked = [(row.prompt_logprobs, list(row.next_ids)) for row in rows]
    assert asked[:3] == [(2, [*range(1, 7)]), (2, [*range(7, 13)]), (2, [13, 14])]
    assert sorted(asked[3:], key=str) == [(2, []), (None, [])]
    outputs = {out.room: out for tokens in node.said(Tokens) for out in tokens.outputs}
    assert [score.logprob for score in outputs[1].prompt_logprobs] == [-i for i in range(1, 15)]
    assert outputs[2].prompt_logprobs == [], "the first token has none, and that is the answer"
    assert outputs[3].prompt_logprobs is None


def test_known_outputs_are_no_part_of_the_prompt() -> None:
    node = prefill()
    sampling = SamplingParams(max_tokens=8, seed=1, prompt_logprobs=0)
    node.router(generate(1, prompt=4, output_ids=[50, 51, 52], sampling=sampling))
    node.peer(destination(1, pages=2), "d")
    for _ in range(3):
        node.step()
    (output,) = (out for tokens in node.said(Tokens) for out in tokens.outputs)
    assert [score.logprob for score in output.prompt_logprobs] == [-1, -2, -3]


def test_a_prompt_whose_logprobs_are_wanted_is_computed_whole() -> None:
    """The cached part of it has KV, but no logits."""
    node = prefill()
    wish = SamplingParams(max_tokens=8, seed=1, prompt_logprobs=0)
    for room, sampling in ((1, SamplingParams(max_tokens=8, seed=1)), (2, wish), (3, wish)):
        node.router(generate(room, prompt=11, sampling=sampling))
        node.peer(destination(room, pages=3), "d")
        for _ in range(4):
            node.step()
        for write in node.sent(Write):
            if write.room == room:
                node.fact(WriteDone(room, write.chunk, 1, 0.1))
    outputs = {out.room: out for tokens in node.said(Tokens) for out in tokens.outputs}
    for room in (2, 3):
        assert [score.logprob for score in outputs[room].prompt_logprobs] == [
            -i for i in range(1, 11)
        ]
        assert outputs[room].cached_tokens == 0
    node.router(generate(4, prompt=11))
    node.peer(destination(4, pages=3), "d")
    batch = node.step().batch
    assert batch is not None
    assert batch.rows[0].start == 8, "who does not ask still finds it cached"
