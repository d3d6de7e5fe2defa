"""What rank 0 runs batches with where ranks share a model."""

from collections.abc import Callable
from typing import NoReturn

from common.engine.guarded import GuardedRunner
from common.engine.parallel.batches import encode_batch
from common.plan import Batch
from common.steps import Pending, Runner


class LeadingRunner(GuardedRunner):
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
        super().__init__(runner, give_up)
        self._tell = tell

    def _start(self, batch: Batch) -> Pending:
        self._tell(encode_batch(batch))
        return super()._start(batch)
