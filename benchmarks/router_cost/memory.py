"""Memory that the router needs for each stream under way.

    python -m benchmarks.router_cost.memory

Opens more and more streams, all of which go on, and reads the router's resident memory.
"""

import argparse
import json
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.router_cost.__main__ import start_ours
from benchmarks.router_cost.stamps import resident_mib
from benchmarks.router_cost.words import make_prompt
from common.config import DEFAULT_MODEL
from deploy.default_model import resolve_model

STEP_S = 0.5
"""Slow, so that streams are there and little else happens."""
MAX_TOKENS = 4096


def open_stream(stack: ExitStack, port: int, payload: bytes) -> None:
    """Begin a streamed request and read its first bytes; it ends with the stack."""
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    connection.sendall(head.encode() + payload)
    answer = connection.recv(4096)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer.decode(errors="replace"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 512, 2048])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    args = parser.parse_args()
    folder = resolve_model(args.model)
    body = {
        "prompt": make_prompt(folder, args.prompt_tokens),
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    payload = json.dumps(body).encode()
    print("| streams | resident MiB | KiB a stream, beyond the first |")
    print("|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        router = start_ours(stack, folder, Path(name), STEP_S)
        count, first = 0, 0.0
        for wanted in sorted(args.streams):
            while count < wanted:
                open_stream(stack, router.port, payload)
                count += 1
            mib = resident_mib(router.pid)
            first = first or mib
            each = (mib - first) * 1024 / (count - 1) if count > 1 else 0.0
            print(f"| {count} | {mib:.1f} | {each:.1f} |", flush=True)


if __name__ == "__main__":
    main()
