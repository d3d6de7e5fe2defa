"""What two ends of a channel hear of each other."""

import threading
from functools import partial
from multiprocessing import Pipe
from queue import SimpleQueue

import msgspec
import pytest

from common.plan import (
    AdapterFailed,
    AdapterRead,
    DropAdapter,
    PlaceAdapter,
    ReadAdapter,
    RemovePeer,
    Write,
)
from common.rank_channel import ChannelClosed, Codec, RankChannel, Topic

WAIT_S = 10.0


class Ends:
    """Two ends; what each heard, and whether it was closed."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        self.theirs = theirs
        self.here, self.there = RankChannel(ours), RankChannel(theirs)
        self.heard: SimpleQueue[tuple[Topic, bytes]] = SimpleQueue()
        self.closed = threading.Event()
        for topic in Topic:
            self.here.listen(topic, partial(self._hear, topic))
        self.here.start(self.closed.set)

    def _hear(self, topic: Topic, payload: bytes) -> None:
        self.heard.put((topic, payload))

    def next(self) -> tuple[Topic, bytes]:
        return self.heard.get(timeout=WAIT_S)


def test_frames_keep_their_order_over_all_topics_and_any_size() -> None:
    ends = Ends()
    sent = [(list(Topic)[n % 4], bytes([n]) * (n * 9000)) for n in range(40)]
    for topic, payload in sent:
        ends.there.send(topic, payload)
    assert [ends.next() for _ in sent] == sent


def test_many_threads_may_send() -> None:
    ends = Ends()

    def send(number: int) -> None:
        for count in range(50):
            ends.there.send(Topic.TRANSFER, bytes([number, count]) * 3000)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    heard = [ends.next()[1] for _ in range(200)]
    for number in range(4):
        mine = [payload for payload in heard if payload[0] == number]
        assert mine == [bytes([number, count]) * 3000 for count in range(50)]
    for thread in threads:
        thread.join()


def test_the_end_of_the_other_side_is_noticed_once_all_was_heard() -> None:
    ends = Ends()
    ends.there.send(Topic.BATCH, b"last")
    ends.theirs.close()
    assert ends.closed.wait(WAIT_S)
    assert ends.next() == (Topic.BATCH, b"last")
    with pytest.raises(ChannelClosed):
        ends.here.send(Topic.BATCH, b"nobody")


def test_a_handler_that_fails_ends_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    ends = Ends()
    ends.here.listen(Topic.ADAPTERS, lambda payload: [][payload[0]])
    ends.there.send(Topic.ADAPTERS, b"\0")
    assert ends.closed.wait(WAIT_S)
    assert "could not be handled" in caplog.text


def test_values_without_tags_come_back_as_what_they_were() -> None:
    codec = Codec(ReadAdapter, PlaceAdapter, DropAdapter, Write, RemovePeer)
    items = [
        PlaceAdapter(4, 1),
        Write(1 << 62, 3, "peer", (1, 5), (7, 8), b"\xc1\0"),
        ReadAdapter(9, "/a/b", ""),
        DropAdapter(9),
        RemovePeer("peer"),
    ]
    assert codec.decode(codec.encode(items)) == items
    assert codec.decode(codec.encode([])) == []


def test_values_of_other_types_are_refused() -> None:
    codec = Codec(AdapterRead, AdapterFailed)
    with pytest.raises(KeyError):
        codec.decode(Codec(DropAdapter).encode([DropAdapter(1)]))
    with pytest.raises(msgspec.MsgspecError):
        codec.decode(msgspec.msgpack.encode([("AdapterRead", {"adapter": "one"})]))
