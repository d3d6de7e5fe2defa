import threading
import time

from common.events import RouterLost
from common.node_io.inbox import Inbox


def test_events_keep_their_order_and_end_a_wait() -> None:
    inbox = Inbox()
    inbox.put(RouterLost("a"))
    inbox.put(RouterLost("b"))
    inbox.wait(30.0)
    assert inbox.drain() == [RouterLost("a"), RouterLost("b")]
    assert inbox.drain() == []
    inbox.close()


def test_wait_sleeps_when_nothing_is_there() -> None:
    inbox = Inbox()
    inbox.put(RouterLost("a"))
    inbox.wait(1.0)
    inbox.drain()
    began = time.monotonic()
    inbox.wait(0.1)
    assert time.monotonic() - began > 0.09
    inbox.close()


def test_nothing_put_by_another_thread_is_missed() -> None:
    inbox = Inbox()
    total = 3000

    def produce() -> None:
        for number in range(total):
            inbox.put(RouterLost(str(number)))

    thread = threading.Thread(target=produce)
    thread.start()
    got: list[object] = []
    end = time.monotonic() + 10
    while len(got) < total and time.monotonic() < end:
        inbox.wait(5.0)
        got.extend(inbox.drain())
    thread.join()
    assert got == [RouterLost(str(number)) for number in range(total)]
    inbox.close()
    inbox.close()
    inbox.wake()
    inbox.wait(5.0)
