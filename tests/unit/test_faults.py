"""The judges of the fault tests are right themselves: phases, streams, memory, the table."""

import pytest

from benchmarks.fault_matrix import table
from tests.faults.load import End, Stream, Work
from tests.faults.matrix import CELLS, Cell, Fault, Outcome
from tests.faults.memory import MemoryWatch, Series
from tests.faults.phases import Phase, in_phase
from tests.faults.soak import Tally
from tests.integration.lora_rig import GUEST
from tests.processes import Fleet

ANSWER = [5, 6, 7]
QUEUES = ("bootstrap", "prealloc", "transfer", "prefilling", "inflight", "running")
IDLE = dict.fromkeys(QUEUES, 0)


def ended(tokens: list[int], end: End, ends: int = 1) -> Stream:
    stream = Stream(Work([1], ANSWER), "http://router", "rid", tokens=tokens)
    stream.close(end)
    stream.ends = ends
    return stream


def test_the_matrix_is_whole() -> None:
    assert len(set(CELLS)) == 3 * 4 * 4
    assert len({str(cell) for cell in CELLS}) == len(CELLS)


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
@pytest.mark.parametrize("phase", Phase)
def test_an_idle_cluster_is_in_no_phase(phase: Phase, role: str) -> None:
    assert not in_phase(phase, role, IDLE, IDLE, IDLE)


@pytest.mark.parametrize(
    ("phase", "role", "own", "prefills", "decodes"),
    [
        (Phase.BOOTSTRAPPING, "prefill", {"bootstrap": 1}, {}, {}),
        (Phase.BOOTSTRAPPING, "decode", {"prealloc": 1}, {}, {}),
        (Phase.BOOTSTRAPPING, "router", {}, {}, {"prealloc": 1}),
        (Phase.PREFILLING, "decode", {"transfer": 1}, {"prefilling": 1}, {}),
        (Phase.TRANSFERRING, "prefill", {"inflight": 1}, {}, {}),
        (Phase.TRANSFERRING, "decode", {"transfer": 1}, {"inflight": 1}, {}),
        (Phase.DECODING, "decode", {"running": 1}, {}, {}),
        (Phase.DECODING, "prefill", {}, {}, {"running": 1}),
        (Phase.DECODING, "router", {}, {}, {"running": 1}),
    ],
)
def test_what_makes_a_phase(
    phase: Phase, role: str, own: dict[str, int], prefills: dict[str, int], decodes: dict[str, int]
) -> None:
    assert in_phase(phase, role, IDLE | own, IDLE | prefills, IDLE | decodes)


@pytest.mark.parametrize(
    ("tokens", "end", "ends", "right", "truly"),
    [
        (ANSWER, End.DONE, 1, True, True),
        (ANSWER, End.DONE, 2, False, False),
        (ANSWER[:2], End.DONE, 1, False, False),
        ([5, 6, 8], End.DONE, 1, False, False),
        (ANSWER[:2], End.CUT, 0, False, True),
        (ANSWER[:2], End.ERROR, 1, False, True),
        ([9], End.ERROR, 1, False, False),
        ([*ANSWER, 8], End.CUT, 0, False, False),
        (ANSWER[:1], End.HUNG, 0, False, False),
    ],
)
def test_how_a_stream_is_judged(
    tokens: list[int], end: End, ends: int, right: bool, truly: bool
) -> None:
    stream = ended(tokens, end, ends)
    assert stream.is_right is right
    assert stream.ended_truly is truly


def test_a_soak_counts_each_stream_once() -> None:
    tally = Tally()
    tally.judge(ended(ANSWER, End.DONE), may_be_aborted=False)
    tally.judge(ended([5], End.LEFT, 0), may_be_aborted=False)
    tally.judge(ended([5], End.ABORTED), may_be_aborted=True)
    assert not tally.wrong + tally.hung + tally.errors
    tally.judge(ended([5], End.ABORTED), may_be_aborted=False)
    assert len(tally.errors) == 1
    tally.judge(ended([5, 7], End.LEFT, 0), may_be_aborted=False)
    tally.judge(ended([5, 6], End.DONE), may_be_aborted=False)
    assert len(tally.wrong) == 2
    tally.judge(ended([5], End.HUNG, 0), may_be_aborted=False)
    assert len(tally.hung) == 1
    assert tally.requests == 7


def test_only_the_adapter_that_comes_and_goes_may_be_not_found() -> None:
    tally = Tally()
    for adapter, error in ((GUEST, "404 {}"), (GUEST, "503 {}"), ("stays", "404 {}")):
        stream = Stream(Work([1], ANSWER, adapter), "http://router", "rid")
        stream.terminal(End.ERROR, error)
        tally.judge(stream, may_be_aborted=False)
    assert len(tally.errors) == 2
    assert not tally.wrong


def test_a_restart_is_no_growth_and_growth_is_seen_over_it() -> None:
    watch = MemoryWatch(Fleet([]))
    watch._series = {
        1: Series("decode", [(float(t), 300.0 + t / 60) for t in range(160)]),
        2: Series("decode", [(float(t), 100.0 + t / 60) for t in range(200, 360)]),
        3: Series("router", [(float(t), 50.0) for t in range(100)]),
        4: Series("router", [(0.0, 1.0), (1.0, 900.0)]),
    }
    assert watch.slopes() == pytest.approx({"decode": 60.0, "router": 0.0})


def test_the_table_counts_failures() -> None:
    first, second = Cell("decode", Fault.KILL, Phase.DECODING), CELLS[0]
    rows = table({first: Outcome(first, 1.25, 9.0, 20, 3), second: "broken"})
    assert rows[2:] == ["| decode | kill-9 | 1 | 1 | 1.2 |", "| prefill | kill-9 | 1 | 0 | nan |"]
