"""All ranks of a node have equally many pages, and all of them hear of it where one has room for
none."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.config import NodeConfig
from common.engine.errors import MemoryPlanError
from common.engine.loader import load_model
from common.engine.memory_plan import GIB, RESERVE_BYTES
from common.engine.parallel.shards import Shard
from common.kv_cache.storage import PagedKVCache
from deploy.errors import StartupError
from deploy.page_pool import make_page_pool
from tests.tiny_models import make_tiny_model
from tests.unit.engine.parallel.rig import Meeting, MetGroup

PAGE_SIZE = 16
HEAD_BYTES = 3 * 2 * PAGE_SIZE * 8 * 4
"""Of the tiny llama: layers, keys and values, tokens, head_dim, float32."""


class Room:
    """A gauge of a device on which `room` bytes are left for pages."""

    def __init__(self, room: int) -> None:
        self._room = room

    def total(self) -> int:
        return GIB + self._room + RESERVE_BYTES

    def free(self) -> int:
        return self._room + RESERVE_BYTES

    def held(self) -> int:
        return GIB

    def most_held(self) -> int:
        return GIB

    def settle(self) -> None:
        """It is settled."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 heads, 3 KV heads: of two ranks the first has two of these."""
    nine = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "nine", **nine)


def make(
    folder: Path, rooms: Sequence[int | None], config: NodeConfig, adapters: int = 0
) -> list[PagedKVCache | Exception]:
    """The pool of each rank, or why it has none; a room of None is host memory."""
    meeting = Meeting(len(rooms))

    def of_rank(rank: int) -> PagedKVCache | Exception:
        group = MetGroup(meeting, rank)
        model = load_model(folder, "float32", group=group)
        shard = Shard.of(model.spec, rank, group.size)
        room = rooms[rank]
        gauge = None if room is None else Room(room)
        profiled: list[int] = []
        try:
            cache = make_page_pool(
                config,
                model,
                shard,
                group,
                gauge,
                lambda cache: profiled.append(cache.num_pages),
                adapters,
            )
        except (StartupError, MemoryPlanError) as error:
            return error
        assert len(profiled) == (0 if room is None else 1)
        assert cache.page_bytes == HEAD_BYTES * len(shard.kv_heads)
        return cache

    with ThreadPoolExecutor(len(rooms)) as threads:
        return list(threads.map(of_rank, range(len(rooms))))


def pages(made: Sequence[PagedKVCache | Exception]) -> list[int]:
    for cache in made:
        assert isinstance(cache, PagedKVCache), cache
    return [cache.num_pages for cache in made if isinstance(cache, PagedKVCache)]


@pytest.mark.parametrize("rooms", [(40, 9), (14, 40)])
def test_the_rank_with_the_least_room_decides(folder: Path, rooms: tuple[int, int]) -> None:
    config = NodeConfig(page_size=PAGE_SIZE, mem_fraction=1.0)
    of_first, of_second = rooms[0] // 2, rooms[1]  # in pages of two heads, and of one
    made = make(folder, [room * HEAD_BYTES for room in rooms], config)
    assert pages(made) == [min(of_first, of_second)] * 2


def test_room_is_kept_for_adapters(folder: Path) -> None:
    config = NodeConfig(page_size=PAGE_SIZE, mem_fraction=1.0)
    assert pages(make(folder, [40 * HEAD_BYTES], config, 10 * HEAD_BYTES)) == [10]


def test_a_rank_without_room_is_everybodys(folder: Path) -> None:
    config = NodeConfig(page_size=PAGE_SIZE, mem_fraction=1.0)
    first, second = make(folder, [40 * HEAD_BYTES, HEAD_BYTES - 1], config)
    assert isinstance(first, StartupError)
    assert "another rank" in str(first)
    assert isinstance(second, MemoryPlanError)


def test_what_is_asked_for_in_gib_is_the_nodes(folder: Path) -> None:
    config = NodeConfig(page_size=PAGE_SIZE, kv_cache_gib=30.5 * HEAD_BYTES / GIB)
    assert pages(make(folder, [None], config)) == [10]
    assert pages(make(folder, [None, None], config)) == [10, 10]
    # Each of four ranks has a head, one of them a copy.
    assert pages(make(folder, [None] * 4, config)) == [7] * 4
