"""When each step's tokens were sent, in memory that sender and client share.

A token says which step drew it: its text is a word of its own, so whoever receives it can look up
when it was sent. Processes of one machine share the monotonic clock.
"""

import mmap
import os
from pathlib import Path

NUM_WORDS = 512
"""Steps that can be told apart; older ones have long arrived."""
FIRST = 0
"""The word of a request's first token, which no step draws."""


class Stamps:
    """A table of times by word."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(8 * NUM_WORDS))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * NUM_WORDS)
        self.times = memoryview(self._map).cast("d")


def word_of_step(step: int) -> int:
    """The word that a step's tokens read."""
    return 1 + step % (NUM_WORDS - 1)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, all threads, from the kernel's scheduler."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return total / 1e9


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no resident memory")
