"""A client's request under way: its choices' tokens come in, batches of text go out.

All choices of a request share one mailbox. A node's message for several of them wakes the handler
once, so that what one step produced leaves in one write.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from router.arrivals import Arrival
from router.detokenizer import Decoder
from router.prepared import Prepared
from router.protocol.terms import Terms
from router.requests import Job, JobAborted, JobFailed, NewTokens, Output
from router.service import RouterService
from router.text_stream import Delta, Finish, TextStream, TokenRecord

TOKEN_BYTES = 256
"""What a token becomes in a stream, about."""
LOGPROB_BYTES = 96
"""What each reported logprob adds, about."""

OnUnsent = Callable[[int], None]
"""Hears how many bytes, about, have piled up since the reader looked last."""


class _Mailbox:
    """Outputs of all choices since the reader looked last."""

    def __init__(self, on_unsent: OnUnsent | None, *, eager: bool) -> None:
        self._eager = eager
        self._on_unsent = on_unsent
        self._unsent_bytes = 0
        self._items: list[tuple[int, Output]] = []
        self._wake = asyncio.Event()

    def put(self, choice: int, output: Output) -> None:
        self._items.append((choice, output))
        if self._on_unsent is not None and isinstance(output, NewTokens):
            self._unsent_bytes += _stream_bytes(output)
            self._on_unsent(self._unsent_bytes)
        if self._eager or not isinstance(output, NewTokens) or output.finish is not None:
            self._wake.set()

    async def take(self) -> list[tuple[int, Output]]:
        await self._wake.wait()
        self._wake.clear()
        items, self._items = self._items, []
        self._unsent_bytes = 0
        return items


def _stream_bytes(output: NewTokens) -> int:
    logprobs = sum(1 + len(logprob.top) for logprob in output.logprobs or ())
    return TOKEN_BYTES * len(output.token_ids) + LOGPROB_BYTES * logprobs


@dataclass(frozen=True, slots=True)
class _ChoiceListener:
    mailbox: _Mailbox
    choice: int

    def deliver(self, output: Output) -> None:
        self.mailbox.put(self.choice, output)


@dataclass(slots=True)
class ChoiceResult:
    """A whole choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenRecord] = field(default_factory=list)
    finish: Finish = Finish.STOP
    matched: str | int | None = None
    message: str = ""

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            self.finish, self.matched, self.message = delta.finish, delta.matched, delta.message


class Generation:
    """Use as a context: whatever is unfinished when it is left is aborted on the nodes.

    `on_unsent` is given where the answer is streamed.

    Raises:
        ApiError: on entering, when the router takes no more work; from `deltas`, when a choice
            cannot be finished.
    """

    def __init__(
        self,
        service: RouterService,
        codec: Decoder,
        arrival: Arrival,
        prepared: Prepared,
        terms: Terms,
        *,
        on_unsent: OnUnsent | None = None,
    ) -> None:
        self.prepared = prepared
        self._arrival = arrival
        self._terms = terms
        self._service = service
        self._jobs: list[Job] = []
        stops = any(choice.text.stops for choice in prepared.choices)
        self._mailbox = _Mailbox(on_unsent, eager=stops or on_unsent is not None)
        self._texts = [
            TextStream(i, codec, choice.text) for i, choice in enumerate(prepared.choices)
        ]

    def __enter__(self) -> Self:
        listeners = [_ChoiceListener(self._mailbox, i) for i in range(len(self._texts))]
        choices = self.prepared.choices
        self._jobs = self._service.submit(self._arrival, self._terms, choices, listeners)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._service.cancel(self._jobs)

    def cancel(self, outcome: str) -> None:
        """End what is unfinished, for a reason other than the client's leaving."""
        self._service.cancel(self._jobs, outcome)

    # ------------------------------------------------------------ usage

    @property
    def prompt_tokens(self) -> int:
        return self.prepared.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return sum(text.num_tokens for text in self._texts)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that prefill did not compute; of the first choice of each prompt."""
        return sum(job.cached_tokens for job in self._jobs[:: self.prepared.n])

    def tokens_of(self, choice: int) -> tuple[int, int, int]:
        """Prompt, completion and cached tokens of one choice."""
        job = self._jobs[choice]
        return len(job.prompt_ids), self._texts[choice].num_tokens, job.cached_tokens

    # ------------------------------------------------------------ output

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What is new, batch by batch, until every choice has finished."""
        while any(text.finish is None for text in self._texts):
            batch = [
                delta
                for choice, output in await self._mailbox.take()
                if (delta := self._take(choice, output)) is not None
            ]
            if batch:
                yield batch

    async def collect(self) -> list[ChoiceResult]:
        """Wait for all choices."""
        results = [ChoiceResult() for _ in self._texts]
        async for batch in self.deltas():
            for delta in batch:
                results[delta.choice].add(delta)
        return results

    def _take(self, choice: int, output: Output) -> Delta | None:
        text = self._texts[choice]
        if text.finish is not None:  # a stop string was found; nodes did not know yet
            return None
        match output:
            case NewTokens():
                delta = text.feed(output)
                if delta.finish is not None and output.finish is None:
                    self._service.cancel([self._jobs[choice]], outcome="stop")
                return delta
            case JobAborted(message):
                return text.abort(message)
            case JobFailed(error):
                raise error
