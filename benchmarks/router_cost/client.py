"""A load client on plain sockets: so many connections, each asking again when it was answered.

It says `begin` once its warm-up is over and waits for a line; then it asks what was ordered, prints
one JSON object of what it saw, and ends.
"""

import argparse
import json
import re
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.router_cost.stamps import FIRST, Stamps
from benchmarks.router_cost.words import find_words, make_prompt

_TEXT = re.compile(rb'"(?:text|content)": ?"([^"]*)"')
END = b"\r\n0\r\n\r\n"


@dataclass
class Seen:
    """What came, in seconds."""

    requests: int = 0
    chunks: int = 0
    ttft: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    """From a token's sending at the node to its arrival here."""


class Connection:
    """One connection and its request under way."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.asked_at = 0.0
        self.tail = b""
        self.first = True
        self.left = 0
        """Requests that it will still make."""

    def ask(self, request: bytes) -> None:
        self.left -= 1
        self.first = True
        self.tail = b""
        self.asked_at = time.monotonic()
        assert self.socket.send(request) == len(request)


class Load:
    """All connections."""

    def __init__(
        self, address: tuple[str, int], num_streams: int, request: bytes, words: dict[bytes, int],
        stamps: Stamps, spread_s: float,
    ) -> None:  # fmt: skip
        self._request = request
        self._words = words
        self._stamps = stamps
        self._spread_s = spread_s
        self._selector = selectors.DefaultSelector()
        self._connections = [Connection(address) for _ in range(num_streams)]
        for connection in self._connections:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def run(self, requests_each: int) -> Seen:
        """Have each connection ask so often; beginnings are spread out evenly."""
        seen = Seen()
        began = time.monotonic()
        waiting = [
            (began + self._spread_s * i / len(self._connections), connection)
            for i, connection in enumerate(self._connections)
        ]
        for connection in self._connections:
            connection.left = requests_each
        waiting.reverse()
        total = requests_each * len(self._connections)
        while seen.requests < total:
            now = time.monotonic()
            while waiting and waiting[-1][0] <= now:
                waiting.pop()[1].ask(self._request)
            wait_s = max(0.0, waiting[-1][0] - now) if waiting else 10.0
            events = self._selector.select(wait_s)
            if not events and not waiting:
                raise TimeoutError(f"{seen.requests} of {total} answers came, then none")
            for key, _ in events:
                self._read(key.data, seen)
        return seen

    def _read(self, connection: Connection, seen: Seen) -> None:
        data = connection.socket.recv(1 << 16)
        now = time.monotonic()
        if not data:
            raise ConnectionError("the router hung up")
        for text in _TEXT.findall(data):
            seen.chunks += 1
            if connection.first:
                connection.first = False
                seen.ttft.append(now - connection.asked_at)
                continue
            word = self._words.get(text, FIRST)
            if word != FIRST:
                seen.late.append(now - self._stamps.times[word])
        connection.tail = (connection.tail + data)[-len(END) :]
        if connection.tail == END:
            seen.requests += 1
            if connection.left:
                connection.ask(self._request)


def _request(address: tuple[str, int], folder: Path, prompt_tokens: int, chunks: int) -> bytes:
    body = {
        "model": "cost",
        "prompt": make_prompt(folder, prompt_tokens),
        "max_tokens": chunks,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--spread-s", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stamps", type=Path, required=True)
    args = parser.parse_args()
    address = ("127.0.0.1", args.port)
    words = {text.encode(): i for i, (_, text) in enumerate(find_words(args.folder))}
    request = _request(address, args.folder, args.prompt_tokens, args.chunks)
    load = Load(address, args.streams, request, words, Stamps(args.stamps), args.spread_s)
    load.run(1)
    print("begin", flush=True)
    sys.stdin.readline()
    seen = load.run(args.requests)
    print(
        json.dumps(
            {
                "requests": seen.requests,
                "chunks": seen.chunks,
                "ttft_p50": _quantile(seen.ttft, 0.5),
                "ttft_p99": _quantile(seen.ttft, 0.99),
                "late_p50": _quantile(seen.late, 0.5),
                "late_p99": _quantile(seen.late, 0.99),
            }
        ),
        flush=True,
    )
    sys.stdin.readline()


if __name__ == "__main__":
    main()
