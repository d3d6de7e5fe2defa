"""A GPU's runner, and what becomes of its node when a step of it fails."""

from collections.abc import Callable
from typing import NoReturn

from common.engine.guarded import GuardedRunner
from common.steps import Runner


class MortalRunner(GuardedRunner):
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
        def judge(error: Exception) -> None:
            if not answers():
                give_up(error)

        super().__init__(runner, judge)
