"""Launches the steps that a scheduler decides and takes them in, in order.

    computes at once       launch n · take n in · launch n+1 · take n+1 in · launch n+2 · ...
    does not wait for it   launch n · launch n+1 · take n in · launch n+2 · take n+1 in · ...

In the second form the host decides step n+2 while the device computes step n+1. At most one step is
in flight while the scheduler decides, and none where the scheduler says that the next one needs
what this one brings (`Scheduler.may_run_ahead`). `land` waits for what is in flight: control
messages are handled behind it, so they find nothing half done.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from common.plan import Batch, BatchResult
from common.scheduler import Scheduler

log = logging.getLogger(__name__)


class Pending(Protocol):
    """A step that was launched."""

    def result(self) -> BatchResult:
        """Wait until all of it is computed; called once, in the order of launching. May raise."""
        ...


class Runner(Protocol):
    """Computes steps, in the order in which they are launched."""

    @property
    def overlaps(self) -> bool:
        """Whether `launch` returns before the step is computed, and takes rows whose token only
        the device knows (`Row.from_slot`)."""
        ...

    def launch(self, batch: Batch) -> Pending:
        """Begin a step; at most one other is then not taken in. May raise."""
        ...


@dataclass(frozen=True, slots=True)
class _NotLaunched:
    """A launch that raised: said when its turn comes, so that steps end in order."""

    error: Exception

    def result(self) -> BatchResult:
        raise self.error


@dataclass(frozen=True, slots=True)
class _Launched:
    pending: Pending
    num_rows: int


class Steps:
    """The steps of one scheduler on one runner."""

    def __init__(
        self, scheduler: Scheduler[Any], runner: Runner, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._in_flight: deque[_Launched] = deque()
        self._launched = False

    def __len__(self) -> int:
        """Steps launched and not taken in."""
        return len(self._in_flight)

    def launch(self, batch: Batch | None) -> None:
        """Begin what this turn has decided; None: nothing."""
        self._launched = batch is not None
        if batch is not None:
            self._in_flight.append(self._launch(batch))

    def take_in(self) -> bool:
        """Wait for the steps of earlier turns and take them in; the step of this turn too, unless
        the next may be decided ahead of it.

        Returns whether there was anything to compute or to take in.
        """
        worked = bool(self._in_flight)
        while len(self._in_flight) > self._launched:
            self._take_in(self._in_flight.popleft())
        if worked and not (self._runner.overlaps and self._may_run_ahead()):
            self.land()
        return worked

    def land(self) -> None:
        """Take in all that is in flight; afterwards nothing is computed."""
        while self._in_flight:
            self._take_in(self._in_flight.popleft())

    def _may_run_ahead(self) -> bool:
        """A launch that failed is said before anything is built on it."""
        if any(isinstance(launched.pending, _NotLaunched) for launched in self._in_flight):
            return False
        return self._scheduler.may_run_ahead

    def _launch(self, batch: Batch) -> _Launched:
        pending: Pending
        try:
            pending = self._runner.launch(batch)
        except Exception as error:
            pending = _NotLaunched(error)
        return _Launched(pending, len(batch.rows))

    def _take_in(self, launched: _Launched) -> None:
        try:
            result = launched.pending.result()
        except Exception as error:
            self._report(error, launched.num_rows)
            message = f"{type(error).__name__}: {error}"
            self._scheduler.process_batch_failure(message, self._clock())
        else:
            self._scheduler.process_batch_result(result, self._clock())

    def _report(self, error: Exception, num_rows: int) -> None:
        log.error("the forward pass of %d rows failed", num_rows, exc_info=error)
