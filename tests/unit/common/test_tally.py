"""Counting is exact; the log is bounded."""

import logging

import pytest

from common import tally
from common.tally import MAX_LINES, REPORT_EVERY_S, Tally


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(tally, "time", made)
    return made


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_each_kind_and_key_gets_a_line_in_ten_seconds(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    it = Tally()
    for _ in range(5):
        it.add("garbage", "from a", key="a")
        it.add("garbage", "from b", key="b")
    assert lines(caplog) == ["garbage (1 so far) from a", "garbage (2 so far) from b"]
    assert it.counts == {"garbage": 10}
    clock.now += REPORT_EVERY_S
    it.add("garbage", "from a", key="a")
    assert lines(caplog)[2:] == ["garbage (11 so far) from a"]


def test_a_crowd_of_senders_fills_neither_log_nor_memory(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    it = Tally()
    for sender in range(10_000):
        it.add("garbage", key=str(sender))
    assert len(lines(caplog)) == MAX_LINES
    assert it.counts["garbage"] == 10_000
    clock.now += REPORT_EVERY_S
    it.add("garbage", key="late")
    assert len(lines(caplog)) == MAX_LINES + 1
    assert len(it._logged_at) == 1
