"""A node's other ranks as real processes: what they compute with rank 0, and whose end is whose."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from common.config import NodeConfig
from common.engine.lora.loader import AdapterLoader
from common.engine.parallel.adapters import SharedAdapters
from common.engine.parallel.leading import LeadingRunner
from common.modes import DisaggregationMode
from common.node_io.settings import NodeIdentity
from common.plan import AdapterEvent, AdapterFailed, AdapterPlaced, PlaceAdapter, ReadAdapter
from common.steps import Runner
from deploy.engine import Engine as RankEngine
from deploy.engine import build, load
from deploy.errors import StartupError
from deploy.ranks import RankProcesses
from tests.adapters import ADAPTERS, PeftOracle, make_adapters
from tests.tiny_models import make_tiny_model
from tests.unit.engine.driving import Engine
from tests.unit.engine.test_lora_greedy import run_mixed

ROOT = Path(__file__).parents[3]
START_S = 90.0
WAIT_S = 30.0
IDENTITY = NodeIdentity(
    role=DisaggregationMode.DECODE, name="decode-0", incarnation="decode-1", pid=os.getpid()
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 heads, 2 KV heads."""
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny", seed=3)


def children() -> set[psutil.Process]:
    """Processes below this one; other tests leave multiprocessing's tracker."""
    return set(psutil.Process().children())


class Driven(Engine):
    """Drives rank 0's engine instead of one of its own."""

    def __init__(self, engine: RankEngine, runner: Runner) -> None:
        self.page_size = engine.cache.page_size
        self.cache = engine.cache
        self.runner = runner  # type: ignore[assignment]
        self.free = list(range(engine.cache.num_pages))


def test_three_processes_compute_what_peft_does(model: Path, tmp_path: Path) -> None:
    """More ranks than KV heads; the base model and adapters of every product in one batch."""
    before = children()
    folders = make_adapters(model, tmp_path)
    oracle = PeftOracle(model, folders)
    config = NodeConfig(
        tp=3, dtype="float32", page_size=4, num_pages=128, threads=1, max_running_requests=8,
        max_lora_rank=40,
    )  # fmt: skip
    ranks = RankProcesses(config, model, IDENTITY)
    loader: AdapterLoader | None = None
    try:
        loaded = load(config, model, ranks.group)
        ranks.connect(loaded)
        engine = build(config, loaded, ranks.group)
        loader = AdapterLoader(engine.shard, engine.slots)
        assert [memory.num_pages for memory in ranks.memories()] == [128, 128]
        ranks.begin_warm_up()
        engine.runner.warm_up()
        ranks.serve()
        place_all(SharedAdapters(loader, ranks.channels), folders)
        driven = Driven(engine, LeadingRunner(engine.runner, ranks.tell_batch, ranks.give_up))
        names = [None, *ADAPTERS, "qv-4"]
        work = [(name, [5 + n, 9, 200 - n] * (2 + n), 8) for n, name in enumerate(names)]
        assert run_mixed(driven, work) == [oracle.greedy(*each) for each in work]
    finally:
        if loader is not None:
            loader.close()
        ranks.close()
    assert children() == before


def place_all(adapters: SharedAdapters, folders: dict[str, Path]) -> None:
    woken = threading.Semaphore(0)
    adapters.start(woken.release)

    def answers(count: int) -> list[AdapterEvent]:
        found: list[AdapterEvent] = []
        while len(found) < count:
            assert woken.acquire(timeout=WAIT_S)
            found += adapters.poll()
        return found

    adapters.submit([ReadAdapter(99, str(ROOT / "nowhere"), "")])
    assert isinstance(answers(1)[0], AdapterFailed)
    numbers = range(len(folders))
    adapters.submit([ReadAdapter(n, str(f), "") for n, f in enumerate(folders.values())])
    answers(len(folders))
    adapters.submit([PlaceAdapter(number, number) for number in numbers])
    assert answers(len(folders)) == [AdapterPlaced(number, number) for number in numbers]


def test_what_keeps_a_rank_from_starting_is_said(model: Path, tmp_path: Path) -> None:
    """Here a part of the files that only the last rank reads too little of."""
    before = children()
    config = NodeConfig(tp=2, dtype="float32", num_pages=16, max_model_len=513)
    ranks = RankProcesses(config, model, IDENTITY)
    try:
        ranks.connect(load(config, model, ranks.group))
        with pytest.raises(StartupError, match="rank 1: max_model_len: 513 is more than"):
            ranks.memories()
    finally:
        ranks.close()
    assert children() == before


# ---------------------------------------------------------------- whole nodes


@contextmanager
def node(model: Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """A node of two ranks that is ready, and its rank 1."""
    flags = ["--num-pages", "16", "--router", "tcp://127.0.0.1:9", "--threads", "1", "--tp", "2"]
    command = [sys.executable, "-m", "decode_node", "--model", str(model), *flags]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=ROOT, stderr=sink)
    try:
        until = time.monotonic() + START_S
        while "ready after" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        (rank,) = psutil.Process(process.pid).children()
        yield process, rank
        rank.wait(WAIT_S)
    finally:
        process.kill()
        process.wait()


def test_a_node_takes_its_ranks_with_it_when_it_leaves(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with node(model, log) as (process, rank):
        # What a terminal or a container's end says to everybody is for rank 0.
        rank.send_signal(signal.SIGINT)
        rank.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert rank.is_running()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0, log.read_text()
        assert not rank.is_running()
    assert "this node ends" not in log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_node_that_is_killed_takes_its_ranks_with_it(model: Path, tmp_path: Path) -> None:
    with node(model, tmp_path / "log") as (process, rank):
        process.kill()
        rank.wait(5.0)


def test_a_node_ends_at_once_when_a_rank_does(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with node(model, log) as (process, rank):
        rank.kill()
        assert process.wait(5.0) == 1
    assert "rank 1 was ended by SIGKILL: this node ends" in log.read_text()
