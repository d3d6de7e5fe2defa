"""A GPU's runner, and what becomes of its node when a step of it fails."""

from collections.abc import Callable
from typing import NoReturn

from common.plan import Batch, BatchResult
from common.steps import Pending, Runner


class MortalRunner:
    """`runner`, of a node that ends with its device.

    A step for which memory is short fails alone. One that ended in a bad access leaves a context in
    which nothing is ever computed again: such a node would take requests and fail them all, so
    `give_up` ends the process. Which it was says `answers`, which waits for all that was launched:
    so a failed step also writes to no page any more when its requests' pages are given away.
    """

    def __init__(
        self,
        runner: Runner,
        answers: Callable[[], bool],
        give_up: Callable[[Exception], NoReturn],
    ) -> None:
        self._runner = runner
        self._answers = answers
        self._give_up = give_up

    @property
    def overlaps(self) -> bool:
        return self._runner.overlaps

    def launch(self, batch: Batch) -> Pending:
        """See `common.steps.Runner`."""
        try:
            return _Step(self, self._runner.launch(batch))
        except Exception as error:
            self.judge(error)
            raise

    def judge(self, error: Exception) -> None:
        """Comes back only if the device is as well as before."""
        if not self._answers():
            self._give_up(error)


class _Step:
    def __init__(self, runner: MortalRunner, pending: Pending) -> None:
        self._runner = runner
        self._pending = pending

    def result(self) -> BatchResult:
        try:
            return self._pending.result()
        except Exception as error:
            self._runner.judge(error)
            raise
