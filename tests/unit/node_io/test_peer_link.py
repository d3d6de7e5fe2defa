"""The side channel's decisions, without sockets or clocks."""

from common.node_io.peer_link import AcceptedPeers, DialledPeer, Numbering


def test_numbers_count_up_and_gaps_are_seen() -> None:
    numbers = Numbering()
    assert [numbers.next(), numbers.next()] == [1, 2]
    assert [numbers.gap(seq) for seq in (5, 6, 8, 9, 9, 10)] == [
        False, False, True, False, True, False,
    ]  # fmt: skip


def test_a_dialling_node_greets_until_it_is_answered() -> None:
    link = DialledPeer(1, 10.0, heartbeat_s=1.0, timeout_s=5.0)
    assert [link.greeting_due(t) for t in (10.0, 10.5, 11.0, 11.0)] == [True, False, True, False]
    link.answered = True
    link.heard(100.0)
    assert not link.greeting_due(100.0)


def test_a_peer_that_pings_but_does_not_answer_is_busy_and_not_silent() -> None:
    link = DialledPeer(1, 10.0, heartbeat_s=1.0, timeout_s=5.0)
    assert not link.silent(15.0)
    assert link.silent(15.1)
    link.heard(14.0)
    assert not link.silent(19.0)
    assert link.silent(19.1)


def test_the_newest_stamp_wins() -> None:
    link = DialledPeer(1, 0.0, 1.0, 5.0)
    assert link.stamp is None
    for stamp in (3.0, 5.0, 4.0):
        link.pinged(stamp, paused=False)
    assert link.stamp == 5.0


def test_the_engine_hears_of_pings_only_around_a_pause() -> None:
    link = DialledPeer(1, 0.0, 1.0, 5.0)
    told = [link.pinged(1.0, paused) for paused in (False, True, True, False, False)]
    assert told == [False, True, True, True, False]


def test_a_link_belongs_to_the_connection_that_greeted_last() -> None:
    peers = AcceptedPeers(timeout_s=5.0)
    assert peers.hear("d1", b"a", 0.0) is None
    first = peers.greet("d1", 1, b"a", 0.0)
    assert peers.greet("d1", 1, b"a", 1.0) is first, "a repeated greeting refreshes"
    second = peers.greet("d1", 2, b"b", 2.0)
    assert peers.greet("d1", 1, b"a", 2.0) is None, "a greeting that the next link's overtook"
    assert peers.hear("d1", b"a", 2.0) is None, "a late word of the older connection"
    assert peers.hear("d1", b"b", 2.0) is second
    assert peers.linked() == ["d1"]


def test_silent_peers_are_unlinked_once() -> None:
    peers = AcceptedPeers(timeout_s=5.0)
    peers.greet("d1", 7, b"a", 0.0)
    peers.greet("d2", 1, b"b", 0.0)
    peers.hear("d2", b"b", 3.0)
    assert peers.take_silent(5.0) == []
    assert peers.take_silent(5.1) == [("d1", 7)]
    assert peers.take_silent(5.2) == []
    assert peers.linked() == ["d2"]
    assert not peers.remove("d2", 2), "another link"
    assert peers.remove("d2", 1)
    assert not peers.remove("d2", 1)


def test_an_older_link_is_known_also_after_the_newer_ones_end() -> None:
    peers = AcceptedPeers(timeout_s=5.0)
    peers.greet("d1", 2, b"b", 0.0)
    peers.remove("d1", 2)
    assert peers.greet("d1", 1, b"a", 0.0) is None
    assert peers.greet("d1", 2, b"b", 0.0) is not None


def test_a_missing_ping_is_doubted_long_before_it_is_a_silence() -> None:
    link = DialledPeer(1, 10.0, heartbeat_s=1.0, timeout_s=5.0)
    link.answered = True
    assert link.silent_s(10.0) is None
    link.heard(10.0)
    assert not link.doubtful(11.5)
    assert link.doubtful(11.6)
    assert [link.greeting_due(t) for t in (11.5, 11.6, 12.0, 12.6)] == [False, True, False, True]
    assert link.silent_s(12.0) == 2.0
