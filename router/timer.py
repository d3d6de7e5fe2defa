"""The router's clock work: a tick many times a second, a sign of life to nodes now and then."""

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger("router")

TICK_S = 0.1


class Timer:
    """Calls back until it is stopped. What a callback raises is logged, and the next one comes."""

    def __init__(
        self,
        *,
        tick: Callable[[float], None],
        beat: Callable[[float], None],
        stood_still: Callable[[float], None],
        beat_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`stood_still` is told how long this process did not run: that silence was its own."""
        self._tick = tick
        self._beat = beat
        self._stood_still = stood_still
        self._beat_s = beat_s
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        beat_at = last = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            late_s = now - last - TICK_S
            if late_s > TICK_S:  # we were stopped or busy, not the nodes
                self._stood_still(late_s)
            last = now
            try:
                self._tick(now)
                if now >= beat_at:
                    beat_at = now + self._beat_s
                    self._beat(now)
            except Exception:
                log.exception("the timer's work failed")
