"""Child processes that belong together: started, listened to, started again, ended.

    start ──▶ running ──(dies before `established`)──▶ ChildDied: the whole group fails
                 │
                 └──(dies later)──▶ wait a growing time ──▶ start      (or stay away: no restart)

Each child leads its own process group, so a Ctrl-C in the terminal reaches the supervisor alone,
which then asks every child to end, and kills those that do not.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from deploy.process import supervised_environment

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
PROVEN_AFTER_S = 60.0
"""A child that lived this long starts its back-off anew."""
TAIL_LINES = 15
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ChildSpec:
    name: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Added to this process's own. May hold secrets."""
    essential: bool = False
    """Without it the group is useless: where nothing is restarted its end is the group's."""


class ChildDied(Exception):
    """A child ended that the group cannot do without; the message tells how and its last lines."""

    def __init__(self, name: str, ending: str, tail: Sequence[str]) -> None:
        lines = "".join(f"\n    {line}" for line in tail) or " nothing"
        super().__init__(f"{name} {ending}; the last it said:{lines}")


class Child:
    """One process at a time under one name; its lines go to stderr with the name before them."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def run(self) -> int:
        """Start it and stay until it has ended and all it wrote is told; the exit code."""
        self.tail.clear()
        environment = {**supervised_environment(os.environ), **dict(self.spec.environment)}
        self._process = await asyncio.create_subprocess_exec(
            *self.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            process_group=0,
        )
        telling = asyncio.create_task(self._tell())
        try:
            code = await self._process.wait()
            # Somebody it started may still hold the pipe.
            await asyncio.wait([telling], timeout=1.0)
        finally:
            telling.cancel()
        return code

    @property
    def pid(self) -> int | None:
        """Process id, also of one that has ended; None before the first start."""
        return None if self._process is None else self._process.pid

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self.is_alive:
            self._process.send_signal(number)

    def kill_group(self) -> None:
        """Kill it and whatever it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _tell(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        rest = b""
        while data := await self._process.stdout.read(_READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._tell_line(line)
            if len(rest) > _READ_BYTES:
                self._tell_line(rest)
                rest = b""
        if rest:
            self._tell_line(rest)

    def _tell_line(self, line: bytes) -> None:
        # A progress bar redraws its line; the last state is the one worth a line.
        text = line.decode(errors="replace").rstrip().rpartition("\r")[2]
        self.tail.append(text)
        say(text, self.spec.name)


class Supervisor:
    """Keeps a group of children alive. Used inside one event loop."""

    def __init__(self, specs: Sequence[ChildSpec], *, restart: bool, stop_timeout_s: float) -> None:
        self._children = [Child(spec) for spec in specs]
        self._restart = restart
        self._stop_timeout_s = stop_timeout_s
        self._established = False
        self._stopping = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all children; what becomes of them is told by `failure`."""
        self._keepers = [asyncio.create_task(self._keep(child)) for child in self._children]

    def pids(self) -> frozenset[int]:
        """The process ids of all children that are alive."""
        alive = (child.pid for child in self._children if child.is_alive)
        return frozenset(pid for pid in alive if pid is not None)

    def establish(self) -> None:
        """From now on a child that dies is started again."""
        self._established = True

    async def failure(self) -> None:
        """Returns never; raises ChildDied when the group cannot go on."""
        keepers = set(self._keepers)
        while keepers:
            done, keepers = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
            for keeper in done:
                keeper.result()
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Ask every child to end, kill what has not after the bound, and take all in.

        The essential ones go first and see their work done by the others, which stay until then.
        """
        self._stopping.set()
        for essential in (True, False):
            leaving = [
                (child, keeper)
                for child, keeper in zip(self._children, self._keepers, strict=False)
                if child.spec.essential is essential
            ]
            for child, _ in leaving:
                child.signal(signal.SIGTERM)
            waiting = [keeper for _, keeper in leaving if not keeper.done()]
            if waiting:
                await asyncio.wait(waiting, timeout=self._stop_timeout_s)
        for child in self._children:
            if child.is_alive:
                say(f"did not end in {self._stop_timeout_s:g} s, killing it", child.spec.name)
            child.kill_group()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def kill(self) -> None:
        """Do not wait for anybody any more."""
        for child in self._children:
            child.kill_group()

    async def _keep(self, child: Child) -> None:
        delay = FIRST_DELAY_S
        while not self._stopping.is_set():
            started = time.monotonic()
            code = await child.run()
            if self._stopping.is_set():
                return
            ending = describe_exit(code)
            if not self._established:
                raise ChildDied(child.spec.name, f"{ending} at start", list(child.tail))
            if not self._restart:
                if child.spec.essential:
                    raise ChildDied(child.spec.name, ending, list(child.tail))
                say(f"{ending}; it stays away", child.spec.name)
                return
            if time.monotonic() - started > PROVEN_AFTER_S:
                delay = FIRST_DELAY_S
            say(f"{ending}; starting it again in {delay:g} s", child.spec.name)
            await self._sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_S)

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but not past the order to stop."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def say(text: str, name: str = "cluster") -> None:
    """One line on stderr, marked with whose it is."""
    print(f"[{name}] {text}", file=sys.stderr, flush=True)
