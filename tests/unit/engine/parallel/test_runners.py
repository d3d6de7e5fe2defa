"""What rank 0 tells the others of a batch, and the order in which all launch and take in steps."""

from typing import NoReturn

import pytest

from common.engine.parallel.batches import decode_batch, encode_batch
from common.engine.parallel.following import FollowingRunner
from common.engine.parallel.leading import LeadingRunner
from common.messages import SamplingParams
from common.plan import Batch, BatchResult, Row, SlotInit

NOTHING = BatchResult((None,))


class Noting:
    """A runner that notes what it is asked; steps are called by their rows' slot."""

    def __init__(self, overlaps: bool = True, fails: str = "") -> None:
        self.overlaps = overlaps
        self.notes: list[str] = []
        self._fails = fails

    def launch(self, batch: Batch) -> "NotedStep":
        self.note(f"launch {batch.rows[0].slot}")
        return NotedStep(self, f"result {batch.rows[0].slot}")

    def note(self, what: str) -> None:
        self.notes.append(what)
        if what == self._fails:
            raise RuntimeError(what)


class NotedStep:
    def __init__(self, runner: Noting, name: str) -> None:
        self._runner = runner
        self._name = name

    def result(self) -> BatchResult:
        self._runner.note(self._name)
        return NOTHING


def step(number: int, *, scored: bool = False) -> Batch:
    more = {"prompt_logprobs": 1, "next_ids": [5]} if scored else {}
    return Batch((Row(number, 0, [4, 5], [0], 0, **more),))  # type: ignore[arg-type]


def test_a_batch_arrives_without_what_only_drawing_needs() -> None:
    secret = SamplingParams(max_tokens=3, seed=5, temperature=0.7, logprobs=2)
    rows = (
        Row(3, 0, (5, 6, 7), (9, 4), 0, SlotInit(secret, (5, 6, 7), ())),
        Row(1, 8, [2], [], 4, lora_slot=2),
        Row(4, 8, (0,), [], 4, from_slot=True),
        Row(2, 16, [4, 5], [1], None, SlotInit(secret, range(18), ()), None, 3, (5, 6)),
    )
    got = decode_batch(encode_batch(Batch(rows))).rows
    for row, twin in zip(rows, got, strict=True):
        assert (twin.slot, twin.start, twin.lora_slot) == (row.slot, row.start, row.lora_slot)
        assert list(twin.token_ids) == list(row.token_ids)
        assert list(twin.new_pages) == list(row.new_pages)
        assert (twin.sample_index is None) == (row.sample_index is None)
        assert (twin.init is None) == (row.init is None)
        assert (twin.prompt_logprobs is None) == (row.prompt_logprobs is None)
        assert twin.from_slot is row.from_slot
        assert len(twin.next_ids) == len(row.next_ids)
        assert twin.init is None or not twin.init.prompt_ids


# ---------------------------------------------------------------- the order of steps


def test_a_rank_launches_the_next_step_before_it_takes_one_in() -> None:
    runner = Noting()
    following = FollowingRunner(runner)
    for number in range(3):
        following.run(encode_batch(step(number)))
    following.land()
    following.land()
    assert runner.notes == [
        "launch 0", "launch 1", "result 0", "launch 2", "result 1", "result 2",
    ]  # fmt: skip


def test_a_step_that_scores_is_taken_in_before_the_next_is_launched() -> None:
    """As on rank 0, since ranks compute together while it is taken in."""
    runner = Noting()
    following = FollowingRunner(runner)
    for number, scored in enumerate((False, True, False)):
        following.run(encode_batch(step(number, scored=scored)))
    assert runner.notes == ["launch 0", "launch 1", "result 0", "result 1", "launch 2"]


def test_where_rank_0_waits_for_each_step_the_others_do() -> None:
    runner = Noting(overlaps=False)
    following = FollowingRunner(runner)
    for number in range(2):
        following.run(encode_batch(step(number)))
    assert runner.notes == ["launch 0", "result 0", "launch 1", "result 1"]


class GaveUp(Exception):
    """Where a node would end."""


def give_up(error: Exception) -> NoReturn:
    raise GaveUp from error


def test_the_others_hear_of_a_batch_before_rank_0_computes_it() -> None:
    runner = Noting()
    leading = LeadingRunner(runner, lambda payload: runner.note("told"), give_up)
    assert leading.overlaps
    assert leading.launch(step(0)).result() is NOTHING
    assert runner.notes == ["told", "launch 0", "result 0"]


@pytest.mark.parametrize("fails", ["told", "launch 0", "result 0"])
def test_whatever_fails_is_given_up(fails: str) -> None:
    runner = Noting(fails=fails)
    leading = LeadingRunner(runner, lambda payload: runner.note("told"), give_up)
    with pytest.raises(GaveUp):
        leading.launch(step(0)).result()
