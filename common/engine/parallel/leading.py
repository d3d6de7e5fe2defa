"""What rank 0 runs batches with where ranks share a model."""

from collections.abc import Callable
from typing import NoReturn

from common.engine.parallel.batches import encode_batch
from common.engine.runner import Computed, ModelRunner
from common.plan import Batch


class LeadingRunner:
    """Tells the other ranks of each batch, and computes rank 0's part of it.

    `tell` hands a batch to them without waiting for it. A pass that fails here leaves the others in
    the middle of theirs, and nothing brings the ranks together again: `give_up` ends the process.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tell: Callable[[bytes], None],
        give_up: Callable[[Exception], NoReturn],
    ) -> None:
        self._runner = runner
        self._tell = tell
        self._give_up = give_up

    overlaps = False

    def launch(self, batch: Batch) -> Computed:
        """See `ModelRunner.launch`."""
        try:
            self._tell(encode_batch(batch))
            return self._runner.launch(batch)
        except Exception as error:
            self._give_up(error)
