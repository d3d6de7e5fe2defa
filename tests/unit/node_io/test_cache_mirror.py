"""What routers hear of a node's prefix cache, against a plain set."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from common.messages import CacheUpdate
from common.node_io.cache_mirror import PART_KEYS, CacheFeed, CacheMirror, Part
from common.plan import CacheChanged

KEYS = st.lists(st.integers(0, 12), max_size=6, unique=True).map(tuple)
CHANGES = st.builds(CacheChanged, evicted=KEYS, stored=KEYS, cleared=st.booleans())


def keys_of(packed: bytes) -> list[int]:
    return list(array("Q", packed))


class Reader:
    """A router that believes all it is told, and insists that it is exact."""

    def __init__(self) -> None:
        self.keys: set[int] = set()
        self.seq = 0

    def read(self, update: CacheUpdate) -> None:
        assert update.seq == self.seq + 1
        self.seq = update.seq
        if update.reset:
            self.keys.clear()
        for key in keys_of(update.evicted):
            self.keys.remove(key)  # nothing is evicted that was not stored
        stored = keys_of(update.stored)
        assert not self.keys & set(stored)
        self.keys |= set(stored)

    def read_all(self, feed: CacheFeed) -> None:
        while feed:
            self.read(feed.next_update())


def apply(model: set[int], change: CacheChanged) -> None:
    if change.cleared:
        model.clear()
    model -= set(change.evicted)
    model |= set(change.stored)


@given(st.lists(st.one_of(CHANGES, st.sampled_from(["batch", "join", "ask", "one"])), max_size=30))
def test_every_link_ends_up_with_what_is_cached(
    steps: list[CacheChanged | str],
) -> None:
    mirror, model = CacheMirror(), set[int]()
    links: list[tuple[CacheFeed, Reader]] = [(CacheFeed(), Reader())]

    def share() -> None:
        batch = mirror.take_batch()
        for feed, _ in links:
            feed.add(batch)

    for step in steps:
        match step:
            case CacheChanged():
                mirror.apply(step)
                apply(model, step)
            case "batch":
                share()
            case "one":  # one message leaves on the oldest link
                feed, reader = links[0]
                if feed:
                    reader.read(feed.next_update())
            case _:
                share()
                if step == "join":
                    links.append((CacheFeed(), Reader()))
                links[-1][0].restart(mirror.snapshot())
    share()
    for feed, reader in links:
        reader.read_all(feed)
        assert reader.keys == model
    assert len(mirror) == len(model)


def test_what_comes_and_goes_between_two_batches_is_not_said() -> None:
    mirror = CacheMirror()
    mirror.apply(CacheChanged(stored=(1, 2)))
    mirror.take_batch()
    mirror.apply(CacheChanged(stored=(3,)))
    mirror.apply(CacheChanged(evicted=(1, 3)))
    mirror.apply(CacheChanged(stored=(1,)))
    assert mirror.take_batch() == []


def test_no_message_is_large_and_only_the_first_resets() -> None:
    mirror = CacheMirror()
    mirror.apply(CacheChanged(stored=tuple(range(2 * PART_KEYS + 5))))
    mirror.take_batch()
    parts = mirror.snapshot()
    assert [len(part.stored) // 8 for part in parts] == [PART_KEYS, PART_KEYS, 5]
    assert [part.reset for part in parts] == [True, False, False]
    mirror.apply(CacheChanged(evicted=tuple(range(PART_KEYS + 1)), stored=(2**64 - 1,)))
    parts = mirror.take_batch()
    assert [(len(p.evicted) // 8, keys_of(p.stored)) for p in parts] == [
        (PART_KEYS, []),
        (1, []),
        (0, [2**64 - 1]),
    ]


def test_an_empty_cache_has_a_snapshot_too() -> None:
    assert CacheMirror().snapshot() == [Part(True, b"", b"")]


def test_keys_travel_little_endian() -> None:
    mirror = CacheMirror()
    mirror.apply(CacheChanged(stored=(1,)))
    assert mirror.take_batch() == [Part(False, b"", b"\1\0\0\0\0\0\0\0")]
