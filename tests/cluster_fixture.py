"""A whole cluster of real processes for a test: `with cluster(model, prefill=2) as c: c.url`.

Everything a test may want to do to it from outside is here: the router's view of the nodes, their
process ids, kill and stop, the log. When the body raises, the log's end is added to the failure.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from tests.processes import PAIRS_ONLY, command_line

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
LOG_LINES_SHOWN = 80


@dataclass(frozen=True)
class NodeInfo:
    """One entry of `nodes` in the router's `/get_server_info`."""

    name: str
    role: str
    url: str
    pid: int
    state: str
    running: int
    free_pages: int
    cached_pages: int
    num_pages: int

    @property
    def is_idle(self) -> bool:
        """Nothing runs and no page is held by a request; cached ones may be."""
        return self.running == 0 and self.free_pages == self.num_pages


class Cluster:
    """A running `pdserve cluster`."""

    def __init__(self, url: str, process: subprocess.Popen[str], log: Path) -> None:
        self.url = url
        self.process = process
        self._log = log

    # ------------------------------------------------------------ looking

    def log(self) -> str:
        """All that the cluster and its children wrote so far."""
        return self._log.read_text()

    def nodes(self, role: str | None = None) -> list[NodeInfo]:
        """The nodes the router knows, all or those of one role, by name."""
        fields = NodeInfo.__dataclass_fields__
        entries = self.get("/get_server_info")["nodes"]
        infos = [NodeInfo(**{name: entry[name] for name in fields}) for entry in entries]
        return sorted((i for i in infos if role in (None, i.role)), key=lambda info: info.name)

    def node(self, name: str) -> NodeInfo:
        (info,) = (info for info in self.nodes() if info.name == name)
        return info

    def pids(self) -> list[int]:
        """The supervisor and every process below it."""
        supervisor = psutil.Process(self.process.pid)
        return [supervisor.pid, *(child.pid for child in supervisor.children(recursive=True))]

    # ------------------------------------------------------------ talking

    def get(self, path: str, url: str | None = None, timeout_s: float = 30.0) -> Any:
        """The JSON answer of a GET; `url` is a node's, the router's if not given."""
        with urllib.request.urlopen((url or self.url) + path, timeout=timeout_s) as response:
            return json.loads(response.read())

    def post(self, path: str, body: object, url: str | None = None, timeout_s: float = 60.0) -> Any:
        """The JSON answer of a POST; raises `urllib.error.HTTPError` for an error status."""
        request = urllib.request.Request(
            (url or self.url) + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.loads(response.read())

    # ------------------------------------------------------------ acting

    def kill(self, name: str) -> int:
        """`kill -9` a node; returns the process id that it had."""
        return self._signal(name, signal.SIGKILL)

    def freeze(self, name: str) -> int:
        """SIGSTOP a node; `thaw` its process id afterwards."""
        return self._signal(name, signal.SIGSTOP)

    def thaw(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)

    def _signal(self, name: str, number: signal.Signals) -> int:
        pid = self.node(name).pid
        os.kill(pid, number)
        return pid

    def interrupt(self) -> int:
        """Ctrl-C, and wait for the end; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_TIMEOUT_S)

    # ------------------------------------------------------------ waiting

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
        """Poll `condition`, which may fail to connect meanwhile; raises TimeoutError."""
        until = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                if condition():
                    return
            if time.monotonic() > until:
                raise TimeoutError(f"not in {timeout_s:g} s: {what}")
            time.sleep(0.05)

    def wait_until_idle(self, timeout_s: float = 30.0) -> None:
        """Until no node runs anything and all pages are free or cached."""
        self.wait_until(
            lambda: all(node.is_idle for node in self.nodes()), "all nodes idle", timeout_s
        )


@contextlib.contextmanager
def cluster(model: Path, prefill: int = 1, decode: int = 1, **flags: object) -> Iterator[Cluster]:
    """Start a cluster on free ports, wait until it is ready, end it afterwards.

    `flags` are those of `pdserve cluster` (`num_pages=32`, `prefill_args="--ucx-tls tcp"`,
    `restart=False`). float32, 128 pages of 16 tokens, one torch thread a node, 2 s for a drain, 90
    s for the start and a router with `PAIRS_ONLY` if not given.
    """
    given = {"dtype": "float32", "num_pages": 128, "port": 0, "drain_s": 2.0, **flags}
    router_args = (*command_line(PAIRS_ONLY), *shlex.split(str(given.get("router_args", ""))))
    given["router_args"] = shlex.join(router_args)
    command = [sys.executable, "-m", "deploy.cli", "cluster", "--model", str(model)]
    command += ["--prefill", str(prefill), "--decode", str(decode)]
    command += command_line(given)
    with tempfile.TemporaryDirectory(prefix="pdserve-cluster-") as folder:
        log = Path(folder) / "log"
        with log.open("w") as sink, _running(command, sink) as process:
            try:
                timeout_s = float(str(given.get("start_timeout_s", START_TIMEOUT_S)))
                running = Cluster(_wait_until_ready(process, timeout_s), process, log)
                yield running
            except BaseException as error:
                lines = log.read_text().splitlines()[-LOG_LINES_SHOWN:]
                error.add_note("the cluster's log ends with\n  " + "\n  ".join(lines))
                raise


@contextlib.contextmanager
def _running(command: list[str], log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """The process, ended with all its children whatever happens."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield process
    finally:
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(family, timeout=5)
        if process.stdout is not None:
            process.stdout.close()


def _wait_until_ready(process: subprocess.Popen[str], timeout_s: float) -> str:
    """The URL in the READY line, which is the first that the cluster prints."""
    assert process.stdout is not None
    watchdog = _kill_after(process, timeout_s)
    try:
        line = process.stdout.readline()
    finally:
        watchdog.cancel()
    if not line.startswith("READY http://"):
        raise RuntimeError(f"the cluster did not start: {line!r}, exit code {process.poll()}")
    return line.split()[1]


def _kill_after(process: subprocess.Popen[str], seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    return timer
