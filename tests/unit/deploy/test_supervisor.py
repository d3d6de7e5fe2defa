"""Children start, are heard, are started again and are ended; real processes, small ones."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy import supervisor as supervisor_module
from deploy.process import pin_to
from deploy.supervisor import ChildDied, ChildSpec, Supervisor, describe_exit

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 20.0


@pytest.fixture(autouse=True)
def _short_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY_S", 0.05)


def child(name: str, code: str, *, essential: bool = False) -> ChildSpec:
    command = (sys.executable, "-u", "-c", code)
    return ChildSpec(name, command, (("PYTHONPATH", str(ROOT)),), essential)


def run(
    specs: list[ChildSpec],
    script: Callable[[Supervisor], Coroutine[Any, Any, None]],
    *,
    restart: bool = True,
    stop_timeout_s: float = 10.0,
) -> None:
    """Start `specs`, let `script` act on them, stop them."""

    async def main() -> None:
        supervisor = Supervisor(specs, restart=restart, stop_timeout_s=stop_timeout_s)
        supervisor.start()
        try:
            await asyncio.wait_for(script(supervisor), TIMEOUT_S)
        finally:
            await supervisor.stop()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def said(folder: Path) -> list[str]:
    """What children wrote into their common file, a line each."""
    path = folder / "said"
    return path.read_text().split() if path.exists() else []


def writes_its_pid(folder: Path, then: str) -> str:
    path = str(folder / "said")
    return f"import os, time, sys, signal\nprint(os.getpid(), file=open({path!r}, 'a'))\n{then}"


def test_lines_carry_the_name_of_the_child(capfd: pytest.CaptureFixture[str]) -> None:
    async def script(supervisor: Supervisor) -> None:
        with pytest.raises(ChildDied):
            await supervisor.failure()

    code = (
        "import sys; print('to stdout'); print('to stderr', file=sys.stderr); "
        "sys.stdout.write('10 %\\r90 %\\rdone\\nno newline at the end')"
    )
    run([child("node-7", code)], script)
    lines = capfd.readouterr().err.splitlines()
    for line in ("to stdout", "to stderr", "done", "no newline at the end"):
        assert f"[node-7] {line}" in lines


def test_a_line_without_end_is_told_in_pieces(capfd: pytest.CaptureFixture[str]) -> None:
    async def script(supervisor: Supervisor) -> None:
        with pytest.raises(ChildDied):
            await supervisor.failure()

    run([child("a", "print('x' * 300_000)")], script)
    assert capfd.readouterr().err.count("x") >= 300_000


def test_a_child_that_dies_at_start_fails_the_group_and_says_why() -> None:
    async def script(supervisor: Supervisor) -> None:
        with pytest.raises(ChildDied, match=r"(?s)bad ended with exit code 3 at start.*no such"):
            await supervisor.failure()

    bad = child("bad", "import sys; print('no such model'); sys.exit(3)")
    run([child("good", "import time; time.sleep(100)"), bad], script)


def test_a_child_that_dies_later_is_started_again(tmp_path: Path) -> None:
    async def script(supervisor: Supervisor) -> None:
        await until(lambda: len(said(tmp_path)) == 1)
        supervisor.establish()
        for number in (1, 2):
            os.kill(int(said(tmp_path)[-1]), signal.SIGKILL)
            await until(lambda number=number: len(said(tmp_path)) == number + 1)  # type: ignore[misc]

    run([child("a", writes_its_pid(tmp_path, "time.sleep(100)"))], script)
    pids = said(tmp_path)
    assert len(set(pids)) == 3
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)


def test_without_restart_a_dead_node_stays_away_but_a_dead_router_ends_all(tmp_path: Path) -> None:
    async def script(supervisor: Supervisor) -> None:
        await until(lambda: len(said(tmp_path)) == 2)
        supervisor.establish()
        pids = dict(pair.split("=") for pair in said(tmp_path))
        failing = asyncio.create_task(supervisor.failure())
        os.kill(int(pids["node"]), signal.SIGKILL)
        await asyncio.sleep(0.3)
        assert not failing.done()
        os.kill(int(pids["router"]), signal.SIGKILL)
        with pytest.raises(ChildDied, match="router was ended by SIGKILL"):
            await failing

    path = str(tmp_path / "said")
    code = "import os, time; print(f'NAME={{os.getpid()}}', file=open({!r}, 'a')); time.sleep(100)"
    specs = [
        child(name, code.format(path).replace("NAME", name), essential=name == "router")
        for name in ("node", "router")
    ]
    run(specs, script, restart=False)
    assert len(said(tmp_path)) == 2


def test_a_child_that_will_not_end_is_killed(tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code = writes_its_pid(tmp_path, "").replace("\n", f"\n{deaf}", 1) + "time.sleep(100)"

    async def script(supervisor: Supervisor) -> None:
        await until(lambda: len(said(tmp_path)) == 1)

    run([child("deaf", code)], script, stop_timeout_s=0.2)
    assert not psutil.pid_exists(int(said(tmp_path)[0]))


def test_the_essential_child_ends_first_while_the_others_still_work(tmp_path: Path) -> None:
    """The router's streams are finished by the nodes."""
    path = str(tmp_path / "said")

    def ends_slowly(name: str) -> str:
        return (
            "import signal, sys, time\n"
            "def end(*_):\n"
            f"    time.sleep(0.2); print('{name}', file=open({path!r}, 'a')); sys.exit(0)\n"
            "signal.signal(signal.SIGTERM, end)\n"
            f"print('up', file=open({path!r}, 'a'))\n"
            "time.sleep(100)"
        )

    async def script(supervisor: Supervisor) -> None:
        await until(lambda: said(tmp_path) == ["up", "up"])

    names = ("node", "router")
    run([child(n, ends_slowly(n), essential=n == "router") for n in names], script)
    assert said(tmp_path)[2:] == ["router", "node"]


def test_stopping_ends_the_wait_for_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY_S", 100.0)
    started = time.monotonic()

    async def script(supervisor: Supervisor) -> None:
        supervisor.establish()
        await asyncio.sleep(0.5)

    run([child("short", "pass")], script)
    assert time.monotonic() - started < 10


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_children_die_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    """The child asks for it itself, as every command does before anything else."""
    asks = "from deploy.process import die_with_supervisor\ndie_with_supervisor()\n"
    code = asks + writes_its_pid(tmp_path, "time.sleep(100)")
    group = (
        "import asyncio, sys\n"
        "from deploy.supervisor import ChildSpec, Supervisor\n"
        "async def main():\n"
        f"    spec = ChildSpec('a', (sys.executable, '-c', {code!r}))\n"
        "    supervisor = Supervisor([spec], restart=True, stop_timeout_s=1)\n"
        "    supervisor.start()\n"
        "    await supervisor.failure()\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", group], env=environment) as parent:
        deadline = time.monotonic() + TIMEOUT_S
        while not said(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.01)
        orphan = psutil.Process(int(said(tmp_path)[0]))
        parent.kill()
    _, alive = psutil.wait_procs([orphan], timeout=5)
    assert not alive


def test_processors_that_are_not_ours_are_refused() -> None:
    with pytest.raises(Exception, match="is not among"):
        pin_to("4095")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (-9, "was ended by SIGKILL"),
        (-99, "was ended by signal 99"),
    ],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words
