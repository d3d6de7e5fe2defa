"""CPU time and delay that a router adds, beside sglang-router where it is given.

    python -m benchmarks.router_cost --peer sglang-env/bin/python

The router has one core to itself, client and stand-in nodes share another. All cells are measured
in turns, this router and the peer, in one run. A cell's cost is split into what a request and what
a chunk takes by least squares over answers of different lengths.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.router_cost.stamps import Stamps, cpu_seconds, resident_mib
from common.config import DEFAULT_MODEL
from deploy.default_model import resolve_model

ROUTER_CORE, OTHER_CORE = 0, 1
CHUNKS = (16, 64, 256)
READY_S = 60.0
HURRIED_CHUNKS_PER_S = 20_000
"""About what a router takes when nodes do not pause between steps."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement."""

    cpu_s: float
    requests: int
    chunks: int
    ttft_p50: float
    ttft_p99: float
    late_p50: float
    late_p99: float

    @property
    def us_per_request(self) -> float:
        return self.cpu_s / self.requests * 1e6


@dataclass(frozen=True, slots=True)
class Target:
    """A router under test."""

    name: str
    port: int
    pid: int
    stamps: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def spawn(stack: ExitStack, core: int, command: Sequence[str], log: Path) -> subprocess.Popen[str]:
    """Start a process on one core; it ends with the stack."""
    output = stack.enter_context(log.open("w"))
    process = subprocess.Popen(
        ["taskset", "-c", str(core), *command], stdout=output, stderr=output, text=True
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def wait_until_ready(port: int, path: str, log: Path) -> None:
    """Raises TimeoutError, with what the process has said."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"port {port} is not ready:\n{log.read_text()[-4000:]}")


def start_ours(stack: ExitStack, folder: Path, work: Path, step_s: float) -> Target:
    """This project's router and two stand-in nodes."""
    port, node_port = free_port(), free_port()
    stamps, log = work / "ours.stamps", work / "router.log"
    Stamps(stamps, create=True)
    command = [sys.executable, "-m", "router", "--model", str(folder), "--port", str(port)]
    command += ["--node-port", str(node_port), "--served-model-name", "cost"]
    router = spawn(stack, ROUTER_CORE, command, log)
    nodes = [sys.executable, "-m", "benchmarks.router_cost.nodes"]
    nodes += ["--router", f"tcp://127.0.0.1:{node_port}", "--folder", str(folder)]
    nodes += ["--stamps", str(stamps), "--step-s", str(step_s)]
    spawn(stack, OTHER_CORE, nodes, work / "nodes.log")
    wait_until_ready(port, "/health/ready", log)
    return Target("pdserve", port, router.pid, stamps)


def start_peer(stack: ExitStack, python: str, folder: Path, work: Path, step_s: float) -> Target:
    """sglang-router in its PD mode and two stand-in workers."""
    port, prefill, decode = free_port(), free_port(), free_port()
    stamps, log = work / "peer.stamps", work / "peer.log"
    Stamps(stamps, create=True)
    workers = [sys.executable, "-m", "benchmarks.router_cost.workers"]
    workers += ["--prefill-port", str(prefill), "--decode-port", str(decode)]
    workers += ["--folder", str(folder), "--stamps", str(stamps), "--step-s", str(step_s)]
    spawn(stack, OTHER_CORE, workers, work / "workers.log")
    wait_until_ready(decode, "/health", work / "workers.log")
    command = [python, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--prefill", f"http://127.0.0.1:{prefill}", "9000"]
    command += ["--decode", f"http://127.0.0.1:{decode}", "--policy", "round_robin"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"]
    command += ["--prometheus-port", str(free_port())]
    router = spawn(stack, ROUTER_CORE, command, log)
    wait_until_ready(port, "/readiness", log)
    return Target("sglang-router", port, router.pid, stamps)


def measure(
    target: Target, folder: Path, streams: int, chunks: int, requests: int, step_s: float,
    prompt_tokens: int,
) -> Cell:  # fmt: skip
    """Run one client and read the router's processor time around it."""
    spread_s = chunks * step_s if streams > 1 else 0.0
    command = ["taskset", "-c", str(OTHER_CORE), sys.executable]
    command += ["-m", "benchmarks.router_cost.client", "--port", str(target.port)]
    command += ["--streams", str(streams), "--chunks", str(chunks), "--requests", str(requests)]
    command += ["--prompt-tokens", str(prompt_tokens), "--spread-s", str(spread_s)]
    command += ["--folder", str(folder), "--stamps", str(target.stamps)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        if client.stdout.readline() != "begin\n":
            raise RuntimeError(f"{target.name}: the client did not get through its warm-up")
        before = cpu_seconds(target.pid)
        print("go", file=client.stdin, flush=True)
        seen = json.loads(client.stdout.readline())
        used = cpu_seconds(target.pid) - before
        print("end", file=client.stdin, flush=True)
    return Cell(cpu_s=used, **seen)


def split(cells: Sequence[Cell]) -> tuple[float, float]:
    """(us a request, us a chunk), by least squares over all cells."""
    lengths = [cell.chunks / cell.requests for cell in cells]
    costs = [cell.us_per_request for cell in cells]
    line = statistics.linear_regression(lengths, costs)
    return line.intercept, line.slope


def compare(
    targets: Sequence[Target], folder: Path, streams: int, step_s: float, args: argparse.Namespace
) -> None:
    """Measure one number of streams, all targets in turns, and print its rows."""
    cells: dict[tuple[str, int], list[Cell]] = {}
    for _ in range(args.rounds):
        for chunks in CHUNKS:
            per_s = 1 / (chunks * step_s) if step_s else HURRIED_CHUNKS_PER_S / chunks / streams
            requests = max(1, round(args.seconds * per_s))
            for target in targets:
                cell = measure(
                    target, folder, streams, chunks, requests, step_s, args.prompt_tokens
                )
                cells.setdefault((target.name, chunks), []).append(cell)
    for target in targets:
        every = [cell for chunks in CHUNKS for cell in cells[target.name, chunks]]
        per_request, per_chunk = split(every)
        shown = cells[target.name, 64]
        times = [
            statistics.median(getattr(cell, name) for cell in shown) * 1e3
            for name in ("ttft_p50", "ttft_p99", "late_p50", "late_p99")
        ]
        total = statistics.median(cell.us_per_request for cell in shown)
        print(
            f"| {streams} | {target.name} | {per_request:.0f} | {per_chunk:.1f} | {total:.0f} | "
            + " | ".join(f"{ms:.2f}" if step_s else "" for ms in times)
            + f" | {resident_mib(target.pid):.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peer", help="a Python that has sglang-router")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 64, 512])
    parser.add_argument(
        "--step-ms", type=float, default=20.0, help="between a stream's tokens; 0: none"
    )
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0, help="of streaming, for each cell")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    folder = resolve_model(args.model)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    step_s = args.step_ms / 1e3
    print(
        "| streams | | us a request | us a chunk | request of 64 chunks, us | "
        "TTFT p50 ms | p99 | token late by p50 ms | p99 | resident MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        work = Path(name)
        targets = [start_ours(stack, folder, work, step_s)]
        if args.peer:
            targets.append(start_peer(stack, args.peer, folder, work, step_s))
        for streams in args.streams:
            compare(targets, folder, streams, step_s, args)


if __name__ == "__main__":
    main()
