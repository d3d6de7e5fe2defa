"""The index of cached pages against plain sets: what nodes said, neither more nor less."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from common.messages import CacheUpdate
from router import cache_index
from router.cache_index import ANSWER_S, PAUSES_S, CacheIndex

NODES = ("a", "b", "c")
PAGES = 40
BIG = 10_000
KEY = st.integers(0, 15)
KEYS = st.lists(KEY, max_size=6, unique=True)


def pack(keys: Iterable[int]) -> bytes:
    return array("Q", keys).tobytes()


def settle(index: CacheIndex) -> None:
    while index.work():
        pass


def depths(model: Mapping[str, set[int]], keys: Sequence[int]) -> dict[str, int]:
    """What `match` should say."""
    found = {}
    for node, held in model.items():
        depth = next((i for i, key in enumerate(keys) if key not in held), len(keys))
        if depth:
            found[node] = depth
    return found


@dataclass
class Speaker:
    """A node that tells the truth."""

    index: CacheIndex
    name: str
    num_pages: int = PAGES
    seq: int = 0
    held: set[int] = field(default_factory=set)

    def join(self) -> None:
        self.seq, self.held = 0, set()
        self.index.join(self.name, self.num_pages)

    def say(
        self,
        stored: Iterable[int] = (),
        evicted: Iterable[int] = (),
        *,
        reset: bool = False,
        lost: int = 0,
        now: float = 0.0,
    ) -> None:
        """`lost`: so many messages before this one did not arrive."""
        if reset:
            self.held.clear()
        gone = [key for key in evicted if key in self.held]
        self.held.difference_update(gone)
        new = [key for key in stored if key not in self.held]
        self.held.update(new)
        self.send(pack(new), pack(gone), reset=reset, lost=lost, now=now)

    def send(
        self,
        stored: bytes,
        evicted: bytes = b"",
        *,
        reset: bool = False,
        lost: int = 0,
        now: float = 0.0,
    ) -> None:
        self.seq += 1 + lost
        update = CacheUpdate(seq=self.seq, reset=reset, evicted=evicted, stored=stored)
        self.index.on_update(self.name, update, now)

    def say_all(self, now: float = 0.0) -> None:
        self.say(tuple(self.held), reset=True, now=now)


def speakers(max_pages: int = BIG, num_pages: int = PAGES) -> tuple[CacheIndex, list[Speaker]]:
    index = CacheIndex(max_pages)
    found = [Speaker(index, name, num_pages) for name in NODES]
    for speaker in found:
        speaker.join()
    return index, found


STEPS = st.lists(
    st.tuples(
        st.sampled_from(NODES),
        st.sampled_from(["say", "say", "say", "reset", "gap", "lie", "leave", "join", "work"]),
        KEYS,
        KEYS,
    ),
    max_size=40,
)


@given(STEPS, st.lists(KEY, max_size=8), st.integers(1, 5))
def test_it_knows_what_the_nodes_said(
    steps: list[tuple[str, str, list[int], list[int]]], prompt: list[int], slice_keys: int
) -> None:
    index, found = speakers()
    by_name = {speaker.name: speaker for speaker in found}
    trusted = dict.fromkeys(NODES, True)
    for name, what, stored, evicted in steps:
        node = by_name[name]
        match what:
            case "say":
                node.say(stored, evicted)
            case "reset":
                node.say(stored, reset=True)
                trusted[name] = trusted[name] or name in index._holders
            case "gap":
                node.say(stored, evicted, lost=1)
                trusted[name] = False
            case "lie":
                settle(index)
                node.send(b"", pack([99]))
                settle(index)
                trusted[name] = False
            case "leave":
                index.leave(name)
                trusted[name] = False
            case "join":
                node.join()
                trusted[name] = True
            case "work":
                index.work(slice_keys)
    settle(index)
    model = {name: by_name[name].held for name in NODES if trusted[name]}
    assert index.match(prompt) == depths(model, prompt)
    assert len(index) == len(set().union(*model.values()))
    for name in NODES:
        assert index.pages_of(name) == len(model.get(name, ()))


@given(STEPS, st.lists(KEY, max_size=8))
def test_a_bounded_index_forgets_and_never_invents(
    steps: list[tuple[str, str, list[int], list[int]]], prompt: list[int]
) -> None:
    index, found = speakers(max_pages=8)
    by_name = {speaker.name: speaker for speaker in found}
    for name, what, stored, evicted in steps:
        if what == "reset":
            by_name[name].say(stored, reset=True)
        else:
            by_name[name].say(stored, evicted)
        settle(index)
        index.match(stored)
        assert len(index) <= 8
    truth = depths({node.name: node.held for node in found}, prompt)
    for node, depth in index.match(prompt).items():
        assert depth <= truth[node]
    assert not index.counters["nonsense"], "what was forgotten here may be evicted there"


def test_the_oldest_pages_go_first_and_a_match_makes_young() -> None:
    index, (a, _, _) = speakers(max_pages=64, num_pages=BIG)
    a.say(range(62))
    settle(index)
    assert index.match([0, 1, 2]) == {"a": 3}
    a.say(range(100, 140))
    settle(index)
    assert index.match([0, 1, 2]) == {"a": 3}
    assert not index.match([3])
    assert len(index) <= 64


def test_a_gap_forgets_the_node_and_asks_it_at_once() -> None:
    index, (a, b, _) = speakers()
    a.say([1, 2])
    b.say([1])
    settle(index)
    a.say([3], lost=1, now=5.0)
    assert index.match([1]) == {"b": 1}
    assert index.due(5.0) == ["a"]
    assert index.due(6.0) == []
    a.say([4], now=6.0)  # still of the old count: ignored
    settle(index)
    assert not index.match([4])
    a.say_all(now=7.0)
    settle(index)
    assert index.match([1, 2]) == {"a": 2, "b": 1}
    assert index.due(1e9) == []
    assert index.counters["gaps"] == 1


def test_a_node_that_does_not_answer_is_asked_again() -> None:
    index, (a, _, _) = speakers()
    a.say([1], lost=1, now=0.0)
    assert index.due(0.0) == ["a"]
    assert index.due(ANSWER_S - 0.1) == []
    assert index.due(ANSWER_S) == ["a"]


def test_every_kind_of_nonsense_costs_the_node_its_entries_only() -> None:
    for lie in (b"123", pack([77] * 3)[:-1], pack(range(PAGES + 1))):
        index, (a, b, _) = speakers()
        a.say([1])
        b.say([1])
        settle(index)
        a.send(lie)
        settle(index)
        assert index.match([1]) == {"b": 1}
        assert index.counters["nonsense"] == 1
    index, (a, _, _) = speakers()
    a.say([1])
    a.send(b"", pack([1, 2]))  # 2 was never there
    settle(index)
    assert index.counters["nonsense"] == 1


def test_pages_of_several_updates_count_together() -> None:
    index, (a, _, _) = speakers()
    a.send(pack(range(PAGES)))
    settle(index)
    assert index.pages_of("a") == PAGES
    a.send(pack([1000]))
    settle(index)
    assert index.counters["nonsense"] == 1
    assert index.pages_of("a") == 0


def test_the_pause_grows_while_a_node_speaks_nonsense_and_no_further_than_its_bound() -> None:
    index, (a, _, _) = speakers()
    now, pauses = 0.0, []
    for _ in range(12):
        a.send(b"nonsense", pack([1]), reset=True, now=now)
        settle(index)
        began = now
        while not index.due(now):
            now += 0.5
        pauses.append(now - began)
    shortest, longest = PAUSES_S
    assert pauses[:3] == [shortest, 2 * shortest, 4 * shortest]
    assert pauses[-1] == longest
    now += 100 * longest
    a.send(b"nonsense", pack([1]), reset=True, now=now)
    settle(index)
    assert index.due(now + shortest) == ["a"], "forgiven after a long calm"


def test_who_is_not_linked_is_not_heard() -> None:
    index = CacheIndex(BIG)
    Speaker(index, "stranger").say([1])
    settle(index)
    assert not index.match([1])
    assert len(index) == 0


def test_a_lost_nodes_bit_is_given_to_another_only_when_swept() -> None:
    index, (a, b, c) = speakers()
    for speaker in (a, b, c):
        speaker.say(range(20))
    settle(index)
    index.leave("a")
    newcomer = Speaker(index, "new")
    newcomer.join()
    assert index.match([0]) == {"b": 1, "c": 1}
    newcomer.say([0])
    settle(index)
    assert index.match([0, 1]) == {"b": 2, "c": 2, "new": 1}
    bits = {holder.bit for holder in index._holders.values()}
    other = Speaker(index, "other")
    other.join()
    assert index._holders["other"].bit < max(bits), "the bit that was swept is free again"


def test_a_large_snapshot_is_taken_in_by_slices() -> None:
    index, (a, _, _) = speakers(num_pages=BIG)
    a.say(range(1000))
    assert index.work(max_keys=100)
    assert 0 < index.pages_of("a") <= 100
    settle(index)
    assert index.match(range(1000)) == {"a": 1000}


def test_masks_are_shared_objects() -> None:
    index, found = speakers(num_pages=BIG)
    names = [f"n{i}" for i in range(40)]
    more = [Speaker(index, name, BIG) for name in names]
    for speaker in more:
        speaker.join()
    for speaker in [*found, *more]:
        speaker.say(range(100))
    settle(index)
    assert len({id(mask) for mask in index._masks.values()}) == 1
    assert len(index._interned) <= cache_index.MAX_INTERNED
