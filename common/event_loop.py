"""The one loop of both node roles: facts in, a plan out, one forward pass, again.

    drain inbox ─▶ poll transfers ─▶ schedule ─▶ submit transfers ─▶ send ─▶ launch batch ─▶ take in
                   and workers                   and workers

It blocks in `wait` whenever there is nothing to compute, and never spins: the transfer and I/O
threads, and the workers that read adapters and compile grammars, wake it. What is taken in is the
batch itself, or the one before where the runner computes while the loop goes on (`common.steps`).
Control messages are handled at the top of a turn, behind what is in flight, so between steps.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, assert_never

from common.events import AdminDone, AdminRequest, Event, Shutdown
from common.messages import (
    AbortRequests,
    AdapterInfo,
    AdminVerb,
    Continue,
    Drain,
    FlushCache,
    LoadAdapter,
    NodeStats,
    Pause,
    UnloadAdapter,
)
from common.plan import (
    AdapterCommand,
    AdapterEvent,
    CompileGrammar,
    GrammarEvent,
    Outgoing,
    TransferCommand,
    TransferEvent,
)
from common.scheduler import Scheduler
from common.stats import RequestEnd, StageSample
from common.steps import Runner, Steps

log = logging.getLogger(__name__)


class Transfers(Protocol):
    """The engine thread's side of a transfer backend; neither call blocks."""

    def submit(self, commands: Sequence[TransferCommand]) -> None: ...

    def poll(self) -> list[TransferEvent]: ...


class Adapters(Protocol):
    """The engine thread's side of what reads and places adapters; neither call blocks."""

    def submit(self, commands: Sequence[AdapterCommand]) -> None: ...

    def poll(self) -> list[AdapterEvent]: ...


class Grammars(Protocol):
    """The engine thread's side of what compiles grammars; neither call blocks."""

    def submit(self, commands: Sequence[CompileGrammar]) -> None: ...

    def poll(self) -> list[GrammarEvent]: ...


class Port(Protocol):
    """The engine thread's side of the I/O thread."""

    def drain(self) -> list[Event]: ...

    def wait(self, timeout_s: float) -> None: ...

    def send(self, messages: Sequence[Outgoing | AdminDone]) -> None: ...

    def publish(
        self,
        stats: NodeStats,
        *,
        adapters: tuple[AdapterInfo, ...],
        samples: Sequence[StageSample],
        transferred: Sequence[tuple[int, float]],
        ends: Sequence[RequestEnd],
    ) -> None: ...


class EventLoop:
    """Drives a scheduler. `run` returns once the node was asked to leave and has drained."""

    def __init__(
        self,
        scheduler: Scheduler[Any],
        runner: Runner,
        transfers: Transfers,
        adapters: Adapters,
        grammars: Grammars,
        port: Port,
        *,
        tick_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._steps = Steps(scheduler, runner, clock)
        self._transfers = transfers
        self._adapters = adapters
        self._grammars = grammars
        self._port = port
        self._tick_s = tick_s
        self._clock = clock

    def run(self) -> None:
        while self.turn():
            pass

    def turn(self) -> bool:
        """One pass; False once the process may end."""
        replies: list[AdminDone] = []
        for event in self._port.drain():
            self._take_in(event, replies)
        for fact in self._transfers.poll():
            self._scheduler.on_transfer(fact, self._clock())
        for outcome in self._adapters.poll():
            self._scheduler.on_adapter(outcome, self._clock())
        for compiled in self._grammars.poll():
            self._scheduler.on_grammar(compiled, self._clock())
        plan = self._scheduler.schedule(self._clock())
        if plan.transfers:
            self._transfers.submit(plan.transfers)
        if plan.adapters:
            self._adapters.submit(plan.adapters)
        if plan.grammars:
            self._grammars.submit(plan.grammars)
        if plan.answers:
            self._publish()  # routers see the change before they hear that it was made
        if plan.messages or replies or plan.answers:
            self._port.send((*plan.messages, *replies, *plan.answers))
        if self._may_end():
            self._steps.land()
            return False
        self._steps.launch(plan.batch)
        worked = self._steps.take_in()
        self._publish()
        if not worked:
            self._port.wait(self._tick_s)
        return True

    def _may_end(self) -> bool:
        scheduler = self._scheduler
        empty = scheduler.is_empty
        if not scheduler.leave.may_end(self._clock(), is_empty=empty):
            return False
        self._publish()
        if empty:
            log.info("drained")
        else:
            stats = scheduler.stats()
            left = {name: count for name, count in stats.queues.items() if count}
            quarantined = stats.quarantined_pages
            log.warning("not drained: left %s, %d pages in quarantine", left, quarantined)
        return True

    def _leave(self, *, at_once: bool = False) -> None:
        """Routers hear of it before they hear what is handed over."""
        log.info("asked to leave%s", " at once" if at_once else "")
        if at_once:
            self._scheduler.leave.force(self._clock())
        else:
            self._scheduler.leave.begin(self._clock())
        self._publish()

    def _publish(self) -> None:
        report = self._scheduler.take_report()
        self._port.publish(
            report.stats,
            adapters=self._scheduler.adapters,
            samples=report.samples,
            transferred=report.transferred,
            ends=report.ends,
        )

    def _take_in(self, event: Event, replies: list[AdminDone]) -> None:
        """One fact. A bug it uncovers is logged and counted; it concerns no other fact."""
        try:
            match event:
                case AdminRequest(ticket, verb):
                    self._steps.land()
                    done = self._administer(ticket, verb)
                    replies += [] if done is None else [done]
                case Shutdown(at_once):
                    self._steps.land()
                    self._leave(at_once=at_once)
                case _:
                    self._scheduler.handle(event, self._clock())
        except Exception:
            log.exception("could not handle %s", type(event).__name__)
            self._scheduler.counters["internal_errors"] += 1

    def _administer(self, ticket: int, verb: AdminVerb) -> AdminDone | None:
        """The verb's answer, or None where it will be in a plan."""
        scheduler = self._scheduler
        match verb:
            case Pause(mode):
                scheduler.pause_generation(mode)
                return AdminDone(ticket, True, f"paused ({mode})")
            case Continue():
                scheduler.continue_generation()
                return AdminDone(ticket, True, "running")
            case FlushCache():
                problem = scheduler.flush_cache()
                return AdminDone(ticket, problem is None, problem or "the cache is empty")
            case Drain():
                self._leave()
                return AdminDone(ticket, True, "draining")
            case AbortRequests(rid):
                return AdminDone(ticket, True, f"aborted {scheduler.abort_requests(rid)}")
            case LoadAdapter() | UnloadAdapter():
                scheduler.change_adapters(ticket, verb)
                return None
            case _:
                assert_never(verb)
