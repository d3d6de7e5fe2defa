"""Faults of prompts' logprobs, planted one by one: each must be noticed."""

from collections.abc import Callable

import pytest

from common.request import Req
from router.requests import Job, NewTokens
from tests.unit.router import test_prompt_logprobs
from tests.unit.scheduler import test_prefill
from tests.unit.scheduler.real_router import RealRouter
from tests.unit.scheduler.test_fuzz import run


def fuzz() -> None:
    for seed in range(20):
        run(seed, router=RealRouter)


Plant = Callable[[pytest.MonkeyPatch], None]


def decode_is_believed_before_prefill_has_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("router.dispatcher.in_turn", lambda _attempt, node, output: ((node, output),))


def they_are_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    def planted(self: Job, news: NewTokens) -> None:
        self.output_ids.extend(news.token_ids)

    patch.setattr(Job, "note_tokens", planted)


def a_chunk_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = Req._next_prompt_ids

    def planted(self: Req, start: int, end: int) -> list[int]:
        return original(self, start, end) if start == 0 else []

    patch.setattr(Req, "_next_prompt_ids", planted)


def a_cached_prefix_is_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Req, "reads_cache", property(lambda _: True))


@pytest.mark.parametrize(
    ("plant", "notices"),
    [
        (
            decode_is_believed_before_prefill_has_told,
            test_prompt_logprobs.test_what_decode_says_first_waits_for_them,
        ),
        (they_are_asked_for_again, fuzz),
        (a_chunk_is_forgotten, fuzz),
        (
            a_cached_prefix_is_left_out,
            test_prefill.test_a_prompt_whose_logprobs_are_wanted_is_computed_whole,
        ),
    ],
)
def test_the_fault_is_noticed(
    plant: Plant, notices: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        notices()
