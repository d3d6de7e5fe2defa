"""The grammar compiler of a virtual node: one grammar after the other, each takes a while."""

import random
from collections import deque
from collections.abc import Sequence

from common.messages import Grammar
from common.plan import CompileGrammar, GrammarCompiled


class FakeCompiler:
    """`submit` and `poll` as the real one; `ready` is what a batch may be drawn by."""

    def __init__(self, chance: random.Random, slowest_s: float = 0.6) -> None:
        self.ready: set[Grammar] = set()
        self._random = chance
        self._slowest_s = slowest_s
        self._jobs: deque[tuple[float, CompileGrammar]] = deque()
        self._busy_until = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def submit(self, commands: Sequence[CompileGrammar], now: float) -> None:
        for command in commands:
            slowness = 0.0 if command.grammar in self.ready else self._random.random()
            self._busy_until = max(now, self._busy_until) + slowness * self._slowest_s
            self._jobs.append((self._busy_until, command))

    def poll(self, now: float) -> list[GrammarCompiled]:
        events = []
        while self._jobs and self._jobs[0][0] <= now:
            command = self._jobs.popleft()[1]
            self.ready.add(command.grammar)
            events.append(GrammarCompiled(command.room))
        return events
