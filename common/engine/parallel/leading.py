"""What rank 0 runs batches with where ranks share a model."""

from collections.abc import Callable
from typing import NoReturn

from common.engine.parallel.batches import encode_batch
from common.plan import Batch, BatchResult
from common.steps import Pending, Runner


class LeadingRunner:
    """Tells the other ranks of each batch, and computes rank 0's part of it with `runner`.

    `tell` hands a batch to them without waiting for it. A step that fails here leaves the others in
    the middle of theirs, and nothing brings the ranks together again: `give_up` ends the process.
    """

    def __init__(
        self,
        runner: Runner,
        tell: Callable[[bytes], None],
        give_up: Callable[[Exception], NoReturn],
    ) -> None:
        self._runner = runner
        self._tell = tell
        self._give_up = give_up

    @property
    def overlaps(self) -> bool:
        return self._runner.overlaps

    def launch(self, batch: Batch) -> Pending:
        """See `common.steps.Runner`."""
        try:
            self._tell(encode_batch(batch))
            return _Led(self._runner.launch(batch), self._give_up)
        except Exception as error:
            self._give_up(error)


class _Led:
    """A step that all ranks were told of."""

    def __init__(self, pending: Pending, give_up: Callable[[Exception], NoReturn]) -> None:
        self._pending = pending
        self._give_up = give_up

    def result(self) -> BatchResult:
        try:
            return self._pending.result()
        except Exception as error:
            self._give_up(error)
