"""Streaming greedy requests whose answers are known beforehand, and what each client saw."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import aiohttp

from tests.integration.oracle import Oracle, random_prompt

TIMEOUT_S = 90.0
"""A stream without an end by then hangs."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request and its only right answer."""

    prompt: list[int]
    answer: list[int]
    adapter: str | None = None
    """Name of the adapter that answers so; None for the base model."""

    def cut(self, count: int) -> "Work":
        """The same, asking for no more than `count` tokens."""
        return Work(self.prompt, self.answer[:count], self.adapter)


def make_work(
    oracle: Oracle,
    chance: random.Random,
    count: int,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    adapter: str | None = None,
    trunk: Sequence[int] = (),
) -> list[Work]:
    """Random prompts with lengths in these (inclusive) ranges, and the oracle's answers.

    Each begins with a part of `trunk`, of any length that leaves a token of its own.
    """
    made = []
    for _ in range(count):
        length = chance.randint(*prompt_tokens)
        shared = list(trunk[: chance.randint(0, min(len(trunk), length - 1))])
        prompt = shared + random_prompt(chance, length - len(shared))
        answer = oracle.answer(prompt, chance.randint(*output_tokens), adapter)
        made.append(Work(prompt, answer, adapter))
    return made


class End(StrEnum):
    DONE = "done"
    """A finish, then `[DONE]`."""
    ERROR = "error"
    """An error status, or an error in the stream."""
    CUT = "cut"
    """The connection ended before the answer did."""
    ABORTED = "aborted"
    """The finish reason says so."""
    HUNG = "hung"
    LEFT = "left"
    """The client went away on purpose."""


@dataclass(slots=True)
class Stream:
    """One client's view of one request."""

    work: Work
    url: str
    """The router it is asked of."""
    rid: str
    """The client's own name for it, for aborts."""
    tokens: list[int] = field(default_factory=list)
    end: End | None = None
    error: str = ""
    events: list[float] = field(default_factory=list)
    """When something new arrived, the end included; monotonic."""
    counts: list[int] = field(default_factory=list)
    """How many tokens there were after each of these, but for the end."""
    ends: int = 0
    """Terminal words seen, of a finish or an error: more than one is a bug."""

    def terminal(self, end: End, error: str) -> None:
        """The server said how it ends."""
        self.ends += 1
        self.close(end, error)

    def close(self, end: End, error: str = "") -> None:
        """It is over, whoever ended it."""
        self.end, self.error = end, error
        self.events.append(time.monotonic())

    @property
    def is_right(self) -> bool:
        """The whole answer, and said to be whole, once."""
        return self.end is End.DONE and self.ends == 1 and self.tokens == self.work.answer

    @property
    def is_prefix(self) -> bool:
        """Whatever came is what should have come."""
        return self.tokens == self.work.answer[: len(self.tokens)]

    @property
    def claims_too_much(self) -> bool:
        """It says that it is whole, and is not the answer."""
        return self.end is End.DONE and self.tokens != self.work.answer

    @property
    def ended_truly(self) -> bool:
        """Right, or a right beginning with an end that says that it is not all."""
        failed = self.end in (End.ERROR, End.CUT, End.ABORTED) and self.ends <= 1
        return self.is_right or (failed and self.is_prefix)

    def went_on_at(self, since: float) -> float | None:
        """When the first thing after `since` arrived; `since` itself if it had ended before."""
        if self.end is not None and self.events[-1] <= since:
            return since
        return next((at for at in self.events if at > since), None)

    def describe(self) -> str:
        """One line for a failed assertion."""
        wanted = self.work.answer
        same = next(
            (i for i, (a, b) in enumerate(zip(self.tokens, wanted, strict=False)) if a != b),
            min(len(self.tokens), len(wanted)),
        )
        return (
            f"{self.end} after {len(self.tokens)} of {len(wanted)} tokens, right up to {same}, "
            f"{len(self.work.prompt)} prompt tokens, adapter {self.work.adapter}, "
            f"{self.ends} ends {self.error}"
        )


class Load:
    """Use as a context: begins all streams at once, leaves none behind."""

    def __init__(self, urls: Sequence[str], works: Sequence[Work], **sampling: Any) -> None:
        """`urls`: routers, asked in turn."""
        self.streams = [
            Stream(work, urls[i % len(urls)], f"load-{uuid4().hex}") for i, work in enumerate(works)
        ]
        self._sampling = sampling
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        self._tasks = [
            asyncio.create_task(follow(self._session, stream, **self._sampling))
            for stream in self.streams
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    @property
    def heard(self) -> int:
        """Tokens that all clients have so far."""
        return sum(len(stream.tokens) for stream in self.streams)

    @property
    def unfinished(self) -> int:
        return sum(1 for stream in self.streams if stream.end is None)

    def leave(self, number: int) -> None:
        """That client closes its connection, wherever it is."""
        self._tasks[number].cancel()

    async def finish(self) -> None:
        """Until every stream has ended; one that hangs ends by its time-out."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in self._tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        for stream in self.streams:
            if stream.end is None:  # it left before it had asked
                stream.close(End.LEFT)

    def went_on_after(self, since: float) -> float:
        """Seconds from `since` until the last of the streams had gone on or ended."""
        times = [stream.went_on_at(since) for stream in self.streams]
        return max((at - since for at in times if at is not None), default=0.0)


async def follow(session: aiohttp.ClientSession, stream: Stream, **sampling: Any) -> None:
    """Ask for a stream and write down all that comes, to whatever end."""
    params: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": len(stream.work.answer),
        "ignore_eos": True,
    }
    body: dict[str, Any] = {"input_ids": stream.work.prompt, "sampling_params": params | sampling}
    body |= {"stream": True, "rid": stream.rid}
    if stream.work.adapter is not None:
        body["lora_path"] = stream.work.adapter
    try:
        async with session.post(stream.url + "/generate", json=body) as response:
            if response.status != 200:
                stream.terminal(End.ERROR, f"{response.status} {await response.text()}")
            elif not await _read(response, stream):
                stream.close(End.CUT, "the answer stopped without [DONE]")
    except asyncio.CancelledError:
        stream.close(End.LEFT)
        raise
    except TimeoutError:
        stream.close(End.HUNG)
    except (aiohttp.ClientError, OSError) as error:
        stream.close(End.CUT, f"{type(error).__name__}: {error}")


async def _read(response: aiohttp.ClientResponse, stream: Stream) -> bool:
    """Take all lines in; whether `[DONE]` was the last."""
    done = False
    async for line in response.content:
        data = line.decode().strip().removeprefix("data: ")
        if not data:
            continue
        if done:
            stream.terminal(End.ERROR, f"after the end came {data[:200]}")
        elif data == "[DONE]":
            done = True
        else:
            _take(json.loads(data), stream)
    return done


def _take(chunk: dict[str, Any], stream: Stream) -> None:
    if "error" in chunk:
        stream.terminal(End.ERROR, json.dumps(chunk["error"]))
        return
    stream.tokens = chunk["output_ids"]
    stream.events.append(time.monotonic())
    stream.counts.append(len(stream.tokens))
    reason = chunk["meta_info"]["finish_reason"]
    if reason is not None:
        end = End.ABORTED if reason["type"] == "abort" else End.DONE
        stream.terminal(end, json.dumps(reason))
