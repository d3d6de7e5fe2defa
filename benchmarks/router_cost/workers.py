"""Stand-in HTTP workers for a router that speaks SGLang's protocol: prefill and decode in one
process, each on its own port. The prefill worker answers at once; the decode worker streams a first
chunk at once and one a step after it.
"""

import argparse
import asyncio
import json
import re
import time
from pathlib import Path

from benchmarks.router_cost.stamps import FIRST, Stamps, word_of_step
from benchmarks.router_cost.words import find_words

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_INFO = {
    "model_path": "cost",
    "served_model_name": "cost",
    "tokenizer_path": "cost",
    "is_generation": True,
    "max_running_requests": 4096,
    "dp_size": 1,
    "status": "ready",
}


class Streams:
    """All answers under way at the decode worker."""

    def __init__(self, words: list[str], stamps: Stamps) -> None:
        self._words = words
        self._stamps = stamps
        self._left: dict[asyncio.Transport, int] = {}
        self._begun = asyncio.Event()

    def begin(self, transport: asyncio.Transport, count: int) -> None:
        head = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        transport.write(head + _chunk(self._words[FIRST], last=count == 1))
        if count > 1:
            self._left[transport] = count - 1
            self._begun.set()

    def end(self, transport: asyncio.Transport) -> None:
        self._left.pop(transport, None)

    async def step_forever(self, step_s: float) -> None:
        step = 0
        at = time.monotonic()
        while True:
            if not self._left:
                self._begun.clear()
                await self._begun.wait()
            at = max(at + step_s, time.monotonic())
            await asyncio.sleep(at - time.monotonic())
            step += 1
            word = word_of_step(step)
            more, last = (_chunk(self._words[word], last=last) for last in (False, True))
            self._stamps.times[word] = time.monotonic()
            for transport, left in tuple(self._left.items()):
                transport.write(more if left > 1 else last)
                self._left[transport] = left - 1
                if left == 1:
                    del self._left[transport]


def _chunk(word: str, *, last: bool) -> bytes:
    body = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1_700_000_000,
        "choices": [
            {
                "index": 0,
                "text": word,
                "logprobs": None,
                "finish_reason": "length" if last else None,
                "matched_stop": None,
            }
        ],
        "model": "cost",
        "usage": None,
    }
    data = b"data: " + json.dumps(body).encode() + b"\n\n"
    framed = b"%x\r\n%s\r\n" % (len(data), data)
    return framed + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n" if last else framed


class Worker(asyncio.Protocol):
    """One connection; `streams` is None at the prefill worker."""

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._streams is not None:
            self._streams.end(self._transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._data[:end])
            total = end + 4 + (int(length.group(1)) if length else 0)
            if len(self._data) < total:
                return
            request, self._data = self._data[:total], self._data[total:]
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        wanted = _MAX_TOKENS.search(request)
        if self._streams is not None and request.startswith(b"POST") and wanted:
            self._streams.begin(self._transport, int(wanted.group(1)))
            return
        body = json.dumps(_INFO).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)


async def serve(
    prefill_port: int, decode_port: int, folder: Path, stamps: Stamps, step_s: float
) -> None:
    """Run both workers until the process is ended. Without `step_s` they are as fast as they
    can."""
    loop = asyncio.get_running_loop()
    streams = Streams([text for _, text in find_words(folder)], stamps)
    await loop.create_server(lambda: Worker(None), "127.0.0.1", prefill_port)
    await loop.create_server(lambda: Worker(streams), "127.0.0.1", decode_port)
    await streams.step_forever(step_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill-port", type=int, required=True)
    parser.add_argument("--decode-port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stamps", type=Path, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    args = parser.parse_args()
    work = serve(args.prefill_port, args.decode_port, args.folder, Stamps(args.stamps), args.step_s)
    asyncio.run(work)


if __name__ == "__main__":
    main()
