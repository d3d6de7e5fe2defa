"""A command to all ranks is answered once, when all have answered, and as the worst of them has."""

from collections.abc import Callable, Sequence
from multiprocessing import Pipe

import pytest

from common.engine.parallel.adapters import EVENTS, SharedAdapters, serve_adapters
from common.plan import (
    AdapterCommand,
    AdapterEvent,
    AdapterFailed,
    AdapterPlaced,
    AdapterRead,
    DropAdapter,
    PlaceAdapter,
    ReadAdapter,
)
from common.rank_channel import RankChannel, Topic
from tests.unit.common.test_rank_channel import Ends


class Told:
    """A loader that remembers what it was told, and says what a test has it say."""

    def __init__(self) -> None:
        self.commands: list[AdapterCommand] = []
        self.events: list[AdapterEvent] = []
        self.closed = False

    def start(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def submit(self, commands: Sequence[AdapterCommand]) -> None:
        self.commands += commands

    def poll(self) -> list[AdapterEvent]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        self.closed = True

    def say(self, *events: AdapterEvent) -> None:
        self.events += events
        self.wake()


class AtOnce(RankChannel):
    """A channel whose frames are handled by the other end in the call that sends them."""

    def __init__(self) -> None:
        super().__init__(Pipe()[0])
        self.other = self

    def send(self, topic: Topic, payload: bytes) -> None:
        self.other._handlers[topic](payload)


class Node:
    """Rank 0 and two others."""

    def __init__(self) -> None:
        self.loaders = [Told() for _ in range(3)]
        channels = []
        for loader in self.loaders[1:]:
            here, there = AtOnce(), AtOnce()
            here.other, there.other = there, here
            serve_adapters(there, loader)
            channels.append(here)
        self.woken = 0
        self.shared = SharedAdapters(self.loaders[0], channels)
        self.shared.start(self._wake)

    def _wake(self) -> None:
        self.woken += 1


READ = AdapterRead(7, "digest", 8)


def test_every_rank_hears_every_command_in_order() -> None:
    node = Node()
    commands: list[AdapterCommand] = [ReadAdapter(7, "/a", ""), DropAdapter(3), PlaceAdapter(8, 1)]
    node.shared.submit(commands)
    assert [loader.commands for loader in node.loaders] == [commands] * 3
    node.shared.close()
    assert [loader.closed for loader in node.loaders] == [True, False, False]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_an_answer_comes_when_all_have_answered(order: tuple[int, ...]) -> None:
    node = Node()
    node.shared.submit([ReadAdapter(7, "/a", ""), PlaceAdapter(8, 1)])
    for rank in order[:2]:
        node.loaders[rank].say(READ, AdapterPlaced(8, 1))
        assert node.shared.poll() == []
    node.loaders[order[2]].say(AdapterPlaced(8, 1))
    assert node.shared.poll() == [AdapterPlaced(8, 1)]
    node.loaders[order[2]].say(READ)
    assert node.woken == 4
    assert node.shared.poll() == [READ]
    assert node.shared.poll() == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_that_cannot_read_it_fails_for_all_and_the_others_forget_it(rank: int) -> None:
    node = Node()
    node.shared.submit([ReadAdapter(7, "/a", "")])
    for number, loader in enumerate(node.loaders):
        loader.commands.clear()
        loader.say(AdapterFailed(7, "no disk") if number == rank else READ)
    assert node.shared.poll() == [AdapterFailed(7, "no disk")]
    assert [loader.commands for loader in node.loaders] == [[DropAdapter(7)]] * 3


def test_ranks_that_read_different_content_have_not_read_it() -> None:
    node = Node()
    node.shared.submit([ReadAdapter(7, "/a", "")])
    for digest, loader in zip(("digest", "digest", "other"), node.loaders, strict=True):
        loader.say(AdapterRead(7, digest, 8))
    (event,) = node.shared.poll()
    assert isinstance(event, AdapterFailed)
    assert "changed" in event.error


def test_one_that_cannot_place_it_fails_for_all() -> None:
    node = Node()
    node.shared.submit([PlaceAdapter(7, 2)])
    node.loaders[1].say(AdapterFailed(7, "no room"))
    for rank in (0, 2):
        node.loaders[rank].say(AdapterPlaced(7, 2))
        node.loaders[rank].commands.clear()
    assert node.shared.poll() == [AdapterFailed(7, "no room")]
    assert node.loaders[0].commands == [], "it is still in memory"


def test_a_rank_that_lost_rank_0_does_not_fail() -> None:
    ends = Ends()
    loader = Told()
    serve_adapters(ends.there, loader)
    loader.say(READ)
    assert EVENTS.decode(ends.next()[1]) == [READ]
    ends.theirs.close()
    loader.say(READ)
