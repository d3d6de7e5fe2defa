"""A runner whose failed steps somebody has to judge."""

from collections.abc import Callable

from common.plan import Batch, BatchResult
from common.steps import Pending, Runner


class GuardedRunner:
    """Runs batches with `runner`. `judge` is given what a step raised, in its launch or its result,
    and may end the process; if it comes back, the step fails alone."""

    def __init__(self, runner: Runner, judge: Callable[[Exception], None]) -> None:
        self._runner = runner
        self._judge = judge

    @property
    def overlaps(self) -> bool:
        return self._runner.overlaps

    def launch(self, batch: Batch) -> Pending:
        """See `common.steps.Runner`."""
        try:
            return _Guarded(self._start(batch), self._judge)
        except Exception as error:
            self._judge(error)
            raise

    def _start(self, batch: Batch) -> Pending:
        return self._runner.launch(batch)


class _Guarded:
    def __init__(self, pending: Pending, judge: Callable[[Exception], None]) -> None:
        self._pending = pending
        self._judge = judge

    def result(self) -> BatchResult:
        try:
            return self._pending.result()
        except Exception as error:
            self._judge(error)
            raise
