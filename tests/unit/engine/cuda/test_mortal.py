"""A node whose GPU is gone ends; one that was short of memory goes on."""

from typing import NoReturn

import pytest

from common.engine.cuda.mortal import MortalRunner
from common.plan import Batch, BatchResult, Row

BATCH = Batch((Row(0, 0, [4], [0], 0),))


class Ended(BaseException):
    """Stands for the end of the process."""


class Failing:
    overlaps = True

    def __init__(self, at: str) -> None:
        self._at = at

    def launch(self, batch: Batch) -> "Failing":
        assert batch is BATCH
        self._reach("launch")
        return self

    def result(self) -> BatchResult:
        self._reach("result")
        return BatchResult((None,))

    def _reach(self, where: str) -> None:
        if where == self._at:
            raise RuntimeError(where)


def give_up(error: Exception) -> NoReturn:
    raise Ended(str(error))


@pytest.mark.parametrize("at", ["launch", "result"])
def test_a_failed_step_on_a_dead_device_ends_the_node(at: str) -> None:
    runner = MortalRunner(Failing(at), lambda: False, give_up)
    with pytest.raises(Ended, match=at):
        runner.launch(BATCH).result()


@pytest.mark.parametrize("at", ["launch", "result"])
def test_a_failed_step_on_a_device_that_answers_fails_alone(at: str) -> None:
    runner = MortalRunner(Failing(at), lambda: True, give_up)
    with pytest.raises(RuntimeError, match=at):
        runner.launch(BATCH).result()


def test_the_device_is_asked_only_where_a_step_failed() -> None:
    runner = MortalRunner(Failing("never"), lambda: pytest.fail("asked"), give_up)
    assert runner.overlaps
    assert runner.launch(BATCH).result() == BatchResult((None,))
