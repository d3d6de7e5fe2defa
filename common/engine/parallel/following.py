"""What the other ranks run batches with where ranks share a model."""

from common.engine.parallel.batches import decode_batch
from common.steps import Pending, Runner


class FollowingRunner:
    """Computes what rank 0 tells, in the order in which rank 0 does: its `runner` is of the same
    kind as rank 0's, but draws nothing.

    Where rank 0 launches a step before it takes the one before in, so does this; what it must take
    in before, it takes in at once, since that computes together with the other ranks.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._in_flight: Pending | None = None

    def run(self, payload: bytes) -> None:
        """Launch a batch as it came. Raises what the runner does, for the step before too."""
        batch = decode_batch(payload)
        launched = self._runner.launch(batch)
        self.land()
        scores = any(row.prompt_logprobs is not None for row in batch.rows)
        if self._runner.overlaps and not scores:
            self._in_flight = launched
        else:
            launched.result()

    def land(self) -> None:
        """Take in what is in flight."""
        before, self._in_flight = self._in_flight, None
        if before is not None:
            before.result()
