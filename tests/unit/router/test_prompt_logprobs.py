"""The prompt's logprobs on their way to the listener: once, whatever happens to the two nodes."""

import pytest

from common.messages import FailureKind, StopReason, TokenLogprob
from router.node import Loss
from router.requests import JobState, NewTokens
from tests.unit.router.desk import Desk, Ear, ear, room

SCORES = [TokenLogprob(-1.0, rank=2), TokenLogprob(-2.0, rank=1)]
"""Of the second and third of the prompt's three tokens."""


def told(heard: Ear) -> list[tuple[int, bool]]:
    """Each delivery: how many tokens, and whether the scores came with it."""
    return [
        (len(output.token_ids), output.prompt_logprobs is not None)
        for output in heard.outputs
        if isinstance(output, NewTokens)
    ]


def test_only_prefill_is_asked_and_only_until_it_has_answered() -> None:
    desk = Desk()
    job = desk.submit(prompt_logprobs=1)
    (for_prefill,), (for_decode,) = desk.generates("p1"), desk.generates("d1")
    assert for_prefill.sampling.prompt_logprobs == 1
    assert for_decode.sampling.prompt_logprobs is None
    desk.tokens("p1", room(job), 0, 7, prompt_logprobs=SCORES)
    desk.tokens("d1", room(job), 0, 7)
    desk.retract("d1", room(job))
    assert [generate.sampling.prompt_logprobs for generate in desk.generates("p1")] == [1, None]
    desk.tokens("p1", room(job), 1, 8)
    desk.tokens("d1", room(job), 1, 8, 9)
    assert ear(job).tokens == [7, 8, 9]
    assert told(ear(job)) == [(1, True), (1, False), (1, False)]


def test_what_decode_says_first_waits_for_them() -> None:
    desk = Desk()
    job = desk.submit(max_tokens=2, prompt_logprobs=0)
    number = room(job)
    desk.tokens("d1", number, 0, 7)
    desk.tokens("d1", number, 1, 8, finish=StopReason.LENGTH)
    assert ear(job).outputs == []
    desk.tokens("p1", number, 0, 7, prompt_logprobs=SCORES)
    assert ear(job).tokens == [7, 8]
    assert told(ear(job)) == [(1, True), (1, False)]
    assert ear(job).ended == "length"
    assert desk.dispatcher.counters["token_gaps"] == 0


@pytest.mark.parametrize("loss", [Loss.SILENT, Loss.LEFT, Loss.GAP])
def test_prefill_is_needed_until_it_has_answered(loss: Loss) -> None:
    """Even where decode has the whole output: the prompt is computed once more."""
    desk = Desk("p1 p2 d1")
    job = desk.submit(max_tokens=2, prompt_logprobs=0)
    first = room(job)
    desk.tokens("d1", first, 0, 7)
    desk.tokens("d1", first, 1, 8, finish=StopReason.LENGTH)
    desk.lose("p1", loss)
    desk.tick(1.0)
    assert room(job) != first
    again = desk.generates("p2" if desk.generates("p2") else "p1")[-1]
    assert (again.sampling.prompt_logprobs, again.output_ids) == (0, [])
    desk.tokens("p2" if desk.generates("p2") else "p1", room(job), 0, 7, prompt_logprobs=SCORES)
    desk.tokens("d1", room(job), 1, 8, finish=StopReason.LENGTH)
    assert ear(job).tokens == [7, 8]
    assert told(ear(job)) == [(1, True), (1, False)]


def test_once_they_are_here_prefill_may_die() -> None:
    desk = Desk("p1 p2 d1")
    job = desk.submit(max_tokens=2, prompt_logprobs=0)
    number = room(job)
    desk.tokens("d1", number, 0, 7)
    desk.tokens("p1", number, 0, 7, prompt_logprobs=SCORES)
    desk.lose("p1", Loss.SILENT)
    assert room(job) == number
    desk.tokens("d1", number, 1, 8, finish=StopReason.LENGTH)
    assert told(ear(job)) == [(1, True), (1, False)]


def test_a_failed_decode_takes_what_was_held_with_it() -> None:
    desk = Desk()
    job = desk.submit(prompt_logprobs=0)
    desk.tokens("d1", room(job), 0, 7)
    desk.fail("d1", room(job), FailureKind.ENGINE)
    assert ear(job).outputs == []
    assert job.state is JobState.BACKING_OFF
    desk.tick(5.0)
    desk.tokens("p1", room(job), 0, 7, prompt_logprobs=SCORES)
    assert told(ear(job)) == [(1, True)]


@pytest.mark.parametrize("scores", [None, SCORES[:1], [*SCORES, SCORES[0]]])
def test_an_answer_without_the_right_number_is_a_gap(scores: list[TokenLogprob] | None) -> None:
    desk = Desk()
    job = desk.submit(prompt_logprobs=0)
    desk.tokens("p1", room(job), 0, 7, prompt_logprobs=scores)
    assert ear(job).outputs == []
    assert desk.dispatcher.counters["token_gaps"] == 1


def test_a_prompt_of_one_token_has_none_and_that_is_told() -> None:
    desk = Desk()
    job = desk.submit(prompt=1, max_tokens=1, prompt_logprobs=0)
    desk.tokens("p1", room(job), 0, 7, finish=StopReason.LENGTH, prompt_logprobs=[])
    assert ear(job).outputs == [NewTokens((7,), None, StopReason.LENGTH, ())]
