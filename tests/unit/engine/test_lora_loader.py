"""The loader thread answers every command once, whatever goes wrong, and ends when asked."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.errors import AdapterError
from common.engine.lora import loader as loader_module
from common.engine.lora.loader import RESTS, AdapterLoader
from common.engine.lora.pool import LoraPool
from common.engine.lora.reader import read_folder
from common.engine.parallel.shards import Shard
from common.plan import (
    AdapterEvent,
    AdapterFailed,
    AdapterPlaced,
    AdapterRead,
    DropAdapter,
    PlaceAdapter,
    ReadAdapter,
)
from tests.adapters import make_adapters
from tests.unit.engine.conftest import Zoo

VARIANT = "llama"
WAIT_S = 20.0


class Loading:
    """A loader that is waited for."""

    def __init__(self, zoo: Zoo) -> None:
        spec = zoo.loaded(VARIANT).spec
        self.pool = LoraPool(spec, torch.float32, slots=2, max_rank=64)
        self.loader = AdapterLoader(Shard.of(spec), self.pool)
        self._woken = threading.Semaphore(0)
        self.loader.start(self._woken.release)

    def events(self, count: int) -> list[AdapterEvent]:
        found: list[AdapterEvent] = []
        while len(found) < count:
            assert self._woken.acquire(timeout=WAIT_S), f"only {found} came"
            found += self.loader.poll()
        assert len(found) == count
        return found

    def event(self) -> AdapterEvent:
        return self.events(1)[0]


@pytest.fixture(scope="module")
def folders(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_adapters(zoo.folder(VARIANT), tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def loading(zoo: Zoo) -> Iterator[Loading]:
    loading = Loading(zoo)
    yield loading
    loading.loader.close()


def test_read_place_and_drop(loading: Loading, zoo: Zoo, folders: dict[str, Path]) -> None:
    spec = zoo.loaded(VARIANT).spec
    known = {name: read_folder(path, spec, 64) for name, path in folders.items()}
    commands = [ReadAdapter(n, str(path), "") for n, path in enumerate(folders.values())]
    loading.loader.submit(commands)
    assert loading.events(len(folders)) == [
        AdapterRead(number, adapter.digest, adapter.rank)
        for number, adapter in enumerate(known.values())
    ]
    assert loading.pool.layers == (), "an adapter in host memory costs no pool"
    loading.loader.submit([PlaceAdapter(0, 1), PlaceAdapter(1, 0), DropAdapter(0)])
    assert loading.events(2) == [AdapterPlaced(0, 1), AdapterPlaced(1, 0)]
    assert loading.pool.slot(1).range.rank == known["all-8"].rank
    loading.loader.submit([PlaceAdapter(0, 0), PlaceAdapter(99, 0)])
    failed = loading.events(2)
    assert failed == [AdapterFailed(0, "it is not in memory"), AdapterFailed(99, failed[0].error)]  # type: ignore[union-attr]
    assert loading.pool.slot(0).range.rank == known["qv-4"].rank, "the slot was not touched"


def test_a_second_read_replaces_the_first(
    loading: Loading, zoo: Zoo, folders: dict[str, Path]
) -> None:
    loading.loader.submit(
        [ReadAdapter(5, str(folders[name]), "") for name in ("all-8", "mlp-16-rslora")]
    )
    first, second = loading.events(2)
    assert isinstance(first, AdapterRead)
    assert isinstance(second, AdapterRead)
    assert first.digest != second.digest
    loading.loader.submit([PlaceAdapter(5, 0)])
    assert loading.event() == AdapterPlaced(5, 0)
    assert loading.pool.slot(0).range.rank == 16


def test_only_the_wanted_content_will_do(loading: Loading, folders: dict[str, Path]) -> None:
    path = str(folders["all-8"])
    loading.loader.submit([ReadAdapter(1, path, "")])
    read = loading.event()
    assert isinstance(read, AdapterRead)
    loading.loader.submit([ReadAdapter(2, path, read.digest), ReadAdapter(3, path, "0" * 32)])
    again, refused = loading.events(2)
    assert again == AdapterRead(2, read.digest, read.rank)
    assert isinstance(refused, AdapterFailed)
    assert "other content" in refused.error
    assert read.digest in refused.error
    loading.loader.submit([PlaceAdapter(3, 0)])
    assert loading.event() == AdapterFailed(3, "it is not in memory")


def test_failures_of_any_kind_are_answered_and_survived(
    loading: Loading,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loading.loader.submit([ReadAdapter(1, str(tmp_path / "nowhere"), "")])
    failed = loading.event()
    assert isinstance(failed, AdapterFailed)
    assert "there is no adapter folder" in failed.error

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(loader_module, "read_folder", broken)
        loading.loader.submit([ReadAdapter(2, str(tmp_path), "")])
        assert loading.event() == AdapterFailed(2, "ZeroDivisionError: planted")
    assert "planted" in caplog.text
    loading.loader.submit([ReadAdapter(3, str(folders["all-8"]), ""), PlaceAdapter(3, 7)])
    read, refused = loading.events(2)
    assert isinstance(read, AdapterRead)
    assert isinstance(refused, AdapterFailed)
    assert "there is no slot 7" in refused.error
    loading.loader.submit([PlaceAdapter(3, 1)])
    assert loading.event() == AdapterPlaced(3, 1)


def test_what_a_hub_takes_long_to_give_holds_up_nobody_else(
    loading: Loading, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = threading.Event()
    asked: list[bool] = []

    def slow_hub(path: str, *, newest: bool) -> Path:
        asked.append(newest)
        assert given.wait(WAIT_S)
        if path == "org/missing":
            raise AdapterError("no such id")
        return folders["all-8"]

    monkeypatch.setattr(loader_module, "fetch_adapter", slow_hub)
    far = [ReadAdapter(1, "org/one", ""), ReadAdapter(2, "org/missing", "")]
    loading.loader.submit([*far, ReadAdapter(3, str(folders["qv-4"]), ""), PlaceAdapter(3, 0)])
    read, placed = loading.events(2)
    assert isinstance(read, AdapterRead)
    assert placed == AdapterPlaced(3, 0)
    given.set()
    one, missing = sorted(loading.events(2), key=lambda event: event.adapter)
    assert isinstance(one, AdapterRead)
    assert missing == AdapterFailed(2, "no such id")
    loading.loader.submit([ReadAdapter(4, "org/one", one.digest), PlaceAdapter(1, 1)])
    assert {event.adapter for event in loading.events(2)} == {1, 4}
    assert asked == [True, True, False], "what was read before need not be asked for"


def test_a_fetch_that_outlives_the_loader_finds_nobody(
    loading: Loading, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, given = threading.Event(), threading.Event()

    def slow_hub(path: str, *, newest: bool) -> Path:
        begun.set()
        assert given.wait(WAIT_S)
        return folders["all-8"]

    monkeypatch.setattr(loader_module, "fetch_adapter", slow_hub)
    loading.loader.submit([ReadAdapter(1, "org/one", "")])
    assert begun.wait(WAIT_S)
    loading.loader.close()
    given.set()
    assert loading.event() == AdapterFailed(1, "this node is ending")


def test_close_in_the_middle_of_a_command(
    loading: Loading, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under way and what is queued fail; what comes later fails at once."""
    reading = threading.Event()
    rest = loading.loader._rest

    def endless(*arguments: Any) -> None:
        reading.set()
        while True:
            rest()

    monkeypatch.setattr(loader_module, "read_folder", endless)
    path = str(folders["all-8"])
    loading.loader.submit([ReadAdapter(1, path, ""), DropAdapter(1), PlaceAdapter(2, 0)])
    assert reading.wait(WAIT_S)
    began = time.monotonic()
    loading.loader.close()
    assert time.monotonic() - began < 1.0
    closed = "this node is ending"
    assert loading.loader.poll() == [AdapterFailed(1, closed), AdapterFailed(2, closed)]
    loading.loader.submit([ReadAdapter(3, str(folders["all-8"]), ""), DropAdapter(3)])
    assert loading.loader.poll() == [AdapterFailed(3, closed)]
    loading.loader.close()


def test_a_loader_that_never_started_closes(zoo: Zoo) -> None:
    spec = zoo.loaded(VARIANT).spec
    loader = AdapterLoader(Shard.of(spec), LoraPool(spec, torch.float32, 1, 8))
    loader.submit([PlaceAdapter(1, 0)])
    loader.close()
    assert loader.poll() == [AdapterFailed(1, "this node is ending")]


def test_it_rests_most_of_the_time(zoo: Zoo, folders: dict[str, Path]) -> None:
    """Work of a millisecond is followed by a longer rest, so a node goes on beside it."""
    spec = zoo.loaded(VARIANT).spec
    loader = AdapterLoader(Shard.of(spec), LoraPool(spec, torch.float32, 1, 64))
    rested_s = 0.0
    worked_s = 0.0

    class Closing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal rested_s
            assert timeout is not None
            rested_s += timeout
            return False

    loader._closing = Closing()
    for _ in range(5):
        loader._rested_at = began = time.monotonic()
        while time.monotonic() - began < 0.01:
            loader._rest()
        worked_s += 0.01
    assert 0.4 * RESTS * worked_s < rested_s < 1.5 * RESTS * worked_s
