"""The loop: order of a turn, when it sleeps, and what an exception concerns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.event_loop import EventLoop
from common.events import AdminDone, AdminRequest, Event, FromPeer, FromRouter, Shutdown
from common.messages import (
    AbortRequests,
    AdapterInfo,
    Continue,
    Drain,
    Failed,
    FailureKind,
    FlushCache,
    LoadAdapter,
    NodeState,
    NodeStats,
    Pause,
    PeerBye,
    PeerHello,
    Retracted,
    Tokens,
    UnloadAdapter,
)
from common.modes import PauseMode
from common.plan import (
    AdapterCommand,
    AdapterEvent,
    AdapterFailed,
    AdapterRead,
    Batch,
    BatchResult,
    CompileGrammar,
    GrammarEvent,
    PeerAdded,
    ReadAdapter,
    Sample,
    ToPeerMsg,
    ToRouterMsg,
    TransferEvent,
    WriteDone,
)
from prefill_node.scheduler import PrefillScheduler
from tests.unit.scheduler.harness import HELLO, destination, generate
from tests.unit.scheduler.node_settings import PAGE_BYTES, settings


@dataclass
class Launched:
    """A step; each row that draws draws token 1."""

    batch: Batch
    did: list[str]

    def result(self) -> BatchResult:
        self.did.append("result")
        rows = self.batch.rows
        return BatchResult(tuple(None if r.sample_index is None else Sample(1) for r in rows))


class Recorder:
    """Runner, transfers and port in one; writes down what the loop did, in order."""

    def __init__(self) -> None:
        self.inbox: list[Event] = []
        self.facts: list[TransferEvent] = []
        self.did: list[str] = []
        self.sent: list[Any] = []
        self.stats = NodeStats()
        self.adapters: tuple[AdapterInfo, ...] = ()
        self.error: Exception | None = None
        self.disk = Disk()
        self.compiler = Compiler()

    def drain(self) -> list[Event]:
        events, self.inbox = self.inbox, []
        return events

    def poll(self) -> list[TransferEvent]:
        facts, self.facts = self.facts, []
        return facts

    def submit(self, commands: Sequence[object]) -> None:
        self.did += [type(command).__name__ for command in commands]

    def send(self, messages: Sequence[object]) -> None:
        self.sent += messages
        self.did.append("send")

    overlaps = False

    def launch(self, batch: Batch) -> Launched:
        self.did.append("run")
        if self.error is not None:
            raise self.error
        return Launched(batch, self.did if self.overlaps else [])

    def wait(self, timeout_s: float) -> None:
        self.did.append("wait")

    def publish(self, stats: NodeStats, *, adapters: tuple[AdapterInfo, ...], **_: object) -> None:
        if adapters != self.adapters:
            self.did.append(f"publish {[adapter.name for adapter in adapters]}")
        self.adapters = adapters
        if stats.state is not self.stats.state:
            self.did.append(f"publish {stats.state}")
        self.stats = stats


class Disk:
    """What reads adapters; a test says what came of it."""

    def __init__(self) -> None:
        self.asked: list[AdapterCommand] = []
        self.events: list[AdapterEvent] = []

    def submit(self, commands: Sequence[AdapterCommand]) -> None:
        self.asked += commands

    def poll(self) -> list[AdapterEvent]:
        events, self.events = self.events, []
        return events


class Compiler:
    """What compiles grammars; a test says what came of it."""

    def __init__(self) -> None:
        self.asked: list[CompileGrammar] = []
        self.events: list[GrammarEvent] = []

    def submit(self, commands: Sequence[CompileGrammar]) -> None:
        self.asked += commands

    def poll(self) -> list[GrammarEvent]:
        events, self.events = self.events, []
        return events


def make() -> tuple[EventLoop, Recorder, PrefillScheduler]:
    recorder = Recorder()
    scheduler = PrefillScheduler(settings("p", 24, prefix_cache=False), PAGE_BYTES)
    loop = EventLoop(
        scheduler, recorder, recorder, recorder.disk, recorder.compiler, recorder, clock=lambda: 0.0
    )
    recorder.inbox.append(FromPeer("d", 1, HELLO))
    recorder.facts.append(PeerAdded("d"))
    loop.turn()
    recorder.inbox += [FromRouter("r", generate(1, prompt=10)), FromPeer("d", 1, destination(1, 3))]
    recorder.did.clear()
    return loop, recorder, scheduler


def test_writes_of_one_chunk_are_submitted_before_the_next_is_computed() -> None:
    loop, recorder, _ = make()
    loop.turn()
    loop.turn()
    assert recorder.did == ["run", "Write", "run"]
    loop.turn()
    assert recorder.did[3:] == ["Write", "send", "wait"]


def test_it_sleeps_when_paused_and_answers_after_what_the_verb_caused() -> None:
    loop, recorder, _ = make()
    loop.turn()
    recorder.did.clear()
    recorder.inbox.append(AdminRequest(7, Pause(PauseMode.RETRACT)))
    loop.turn()
    assert recorder.did[:2] == ["Write", "send"]  # the chunk computed before the pause
    assert recorder.did[-1] == "wait"
    recorder.facts.append(WriteDone(1, 0, 1, 0.1))
    retracted, done = recorder.sent[-2:]
    assert retracted == ToRouterMsg("r", Retracted(1))
    assert isinstance(done, AdminDone)
    assert (done.ticket, done.ok) == (7, True)
    recorder.inbox += [
        AdminRequest(8, Continue()),
        AdminRequest(9, AbortRequests()),
    ]
    loop.turn()
    recorder.inbox.append(AdminRequest(10, FlushCache()))
    loop.turn()
    answers = [m for m in recorder.sent if isinstance(m, AdminDone)]
    assert [(a.ticket, a.ok) for a in answers] == [(7, True), (8, True), (9, True), (10, True)]


def test_a_failed_pass_ends_its_requests_and_the_loop_goes_on() -> None:
    loop, recorder, scheduler = make()
    recorder.error = RuntimeError("out of luck")
    assert loop.turn()
    recorder.error = None
    assert loop.turn()
    failed = [m.body for m in recorder.sent if isinstance(m, ToRouterMsg)]
    assert isinstance(failed[0], Failed)
    assert failed[0].kind is FailureKind.ENGINE
    assert "out of luck" in failed[0].message
    assert scheduler.kv.num_free == 24


def test_a_fact_that_cannot_be_handled_concerns_no_other() -> None:
    loop, recorder, scheduler = make()
    bad = PeerHello(fingerprint=None, memories=None, lease_s=1.0)  # type: ignore[arg-type]
    recorder.inbox.insert(0, FromPeer("x", 1, bad))
    assert loop.turn()
    assert scheduler.counters["internal_errors"] == 1
    assert "run" in recorder.did


def test_asked_to_end_it_finishes_what_it_computes_first() -> None:
    loop, recorder, _ = make()
    loop.turn()
    recorder.inbox.append(Shutdown())
    turns = 0
    while loop.turn():
        turns += 1
        if recorder.did[-1] == "wait":
            recorder.facts += [WriteDone(1, chunk, 1, 0.1) for chunk in range(2)]
        assert turns < 10
    outputs = [m.body for m in recorder.sent if isinstance(m, ToRouterMsg)]
    assert isinstance(outputs[-1], Tokens)
    assert recorder.sent[-1] == ToPeerMsg("d", 1, PeerBye())
    assert recorder.stats.state is NodeState.DRAINING


def test_asked_to_end_at_once_it_hands_over_and_ends() -> None:
    loop, recorder, _ = make()
    loop.turn()
    recorder.inbox.append(Shutdown(at_once=True))
    assert not loop.turn()
    assert recorder.sent[-1] == ToRouterMsg("r", Retracted(1))


def test_the_state_is_published_before_anything_is_handed_over() -> None:
    loop, recorder, _ = make()
    recorder.inbox.append(AdminRequest(3, Drain()))
    assert not loop.turn()
    assert recorder.did[:2] == ["publish draining", "send"]
    assert recorder.sent[-1] == AdminDone(3, True, "draining")


def answers(recorder: Recorder) -> list[AdminDone]:
    return [message for message in recorder.sent if isinstance(message, AdminDone)]


def test_an_adapter_is_published_before_its_load_is_answered() -> None:
    loop, recorder, _ = make()
    recorder.inbox.append(AdminRequest(7, LoadAdapter(name="a", path="/a")))
    loop.turn()
    (command,) = recorder.disk.asked
    assert isinstance(command, ReadAdapter)
    assert command.path == "/a"
    assert answers(recorder) == []
    assert "run" in recorder.did, "steps go on while it is read"
    recorder.disk.events.append(AdapterRead(command.adapter, "digest", 8))
    recorder.did.clear()
    loop.turn()
    assert recorder.did[-3:] == ["publish ['a']", "send", "run"]
    (done,) = answers(recorder)
    assert (done.ticket, done.ok, done.digest) == (7, True, "digest")
    assert recorder.adapters == (AdapterInfo(name="a", digest="digest", path="/a", rank=8),)


def test_an_adapter_that_cannot_be_read_is_answered_with_the_reason() -> None:
    loop, recorder, _ = make()
    recorder.inbox.append(AdminRequest(7, LoadAdapter(name="a", path="/a")))
    loop.turn()
    (command,) = recorder.disk.asked
    assert isinstance(command, ReadAdapter)
    recorder.disk.events.append(AdapterFailed(command.adapter, "incompatible: too wide"))
    loop.turn()
    (done,) = answers(recorder)
    assert (done.ticket, done.ok) == (7, False)
    assert "incompatible: too wide" in done.message
    assert recorder.adapters == ()


def test_routers_hear_that_an_adapter_is_gone_before_the_unload_is_answered() -> None:
    loop, recorder, _ = make()
    recorder.inbox.append(AdminRequest(7, LoadAdapter(name="a", path="/a")))
    loop.turn()
    (command,) = recorder.disk.asked
    assert isinstance(command, ReadAdapter)
    recorder.disk.events.append(AdapterRead(command.adapter, "digest", 8))
    loop.turn()
    recorder.did.clear()
    recorder.inbox.append(AdminRequest(8, UnloadAdapter("a")))
    loop.turn()
    assert recorder.did.index("publish []") < recorder.did.index("send")
    assert [(done.ticket, done.ok) for done in answers(recorder)] == [(7, True), (8, True)]


def test_a_load_under_way_is_answered_when_the_node_leaves() -> None:
    loop, recorder, _ = make()
    recorder.inbox += [AdminRequest(7, LoadAdapter(name="a", path="/a")), Shutdown(at_once=True)]
    while loop.turn():
        assert len(recorder.did) < 50
    assert [(done.ticket, done.ok) for done in answers(recorder)] == [(7, False)]
