"""What nodes were given of late, and how long that is remembered."""

from router.recent import LEAST_WINDOW_TOKENS, WINDOW_S, WINDOW_TOKENS, RecentWork
from tests.unit.router.candidates import candidate


def filled(pace: float | None) -> float:
    """What is remembered of one node once it was given very much."""
    work, node, other = RecentWork(), candidate("a"), candidate("b")
    work.join(node)
    work.join(other)
    if pace is not None:
        work.pace(pace)
    for _ in range(1000):
        work.give(node, 500)
        work.give(other, 500)
    return node.recent


def test_the_window_holds_seconds_of_work_within_bounds() -> None:
    for pace, window in (
        (None, WINDOW_TOKENS), (0.0, WINDOW_TOKENS), (1e6, WINDOW_TOKENS),
        (2000.0, WINDOW_S * 2000), (1.0, LEAST_WINDOW_TOKENS),
    ):  # fmt: skip
        assert window / 2 - 500 <= filled(pace) <= window, pace


def test_a_pace_that_falls_lets_the_past_fade_at_once() -> None:
    work, node = RecentWork(), candidate("a")
    work.join(node)
    work.give(node, WINDOW_TOKENS)
    work.pace(1.0)
    work.give(node, 1)
    assert node.recent <= LEAST_WINDOW_TOKENS


def test_who_joins_has_missed_nothing_and_who_leaves_is_forgotten() -> None:
    work, old, new = RecentWork(), candidate("a"), candidate("b")
    work.join(old)
    work.give(old, 1000)
    work.join(new)
    assert new.recent == 1000
    work.forget(old)
    work.give(new, 10)
    assert new.recent == 1010
