"""A client's request under way: its choices' tokens come in, batches of text go out.

Tokens are taken in and handed on where they come, in the turn of the event loop that read them
from the node: no task is woken for them. What one turn brought for all choices of a request is one
batch, so that it leaves in one write. The handler's task sleeps until the whole request has ended.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from common.messages import TokenLogprob
from router.arrivals import Arrival
from router.detokenizer import Decoder
from router.errors import ApiError, internal
from router.prepared import Prepared
from router.protocol.terms import Terms
from router.requests import Job, JobAborted, JobFailed, NewTokens, Output
from router.service import RouterService
from router.text_stream import Delta, Finish, TextStream, TokenRecord
from router.tools.calls import CallDelta, join_calls

log = logging.getLogger("router")


class Sink(Protocol):
    """Where a request's text goes. Called from the event loop, so it must not wait."""

    eager: bool
    """Whether it wants text while it comes; else all of a choice at its end will do."""

    def take(self, batch: Sequence[Delta]) -> None:
        """What is new, in order."""

    def end(self) -> None:
        """Every choice has finished, or the request has failed."""


@dataclass(frozen=True, slots=True)
class _ChoiceListener:
    generation: "Generation"
    choice: int

    def deliver(self, output: Output) -> None:
        """It is taken in at the end of the event loop's turn."""
        self.generation.items.append((self.choice, output))
        if not self.generation.is_due:
            self.generation.note(output)


@dataclass(slots=True)
class ChoiceResult:
    """A whole choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenRecord] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob] = ()
    calls: list[CallDelta] = field(default_factory=list)
    """Whole, or as far as they came."""
    finish: Finish = Finish.STOP
    matched: str | int | None = None
    message: str = ""

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        join_calls(self.calls, delta.calls)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish is not None:
            self.finish, self.matched, self.message = delta.finish, delta.matched, delta.message


class _Collector:
    """Keeps all choices whole."""

    eager = False

    def __init__(self, num_choices: int) -> None:
        self.results = [ChoiceResult() for _ in range(num_choices)]
        self.ended = asyncio.Event()

    def take(self, batch: Sequence[Delta]) -> None:
        for delta in batch:
            self.results[delta.choice].add(delta)

    def end(self) -> None:
        self.ended.set()


class Generation:
    """Use as a context: whatever is unfinished when it is left is aborted on the nodes.

    Raises:
        ApiError: on entering, when the router takes no more work.
    """

    def __init__(
        self,
        service: RouterService,
        codec: Decoder,
        arrival: Arrival,
        prepared: Prepared,
        terms: Terms,
    ) -> None:
        self.prepared = prepared
        self._arrival = arrival
        self._terms = terms
        self._service = service
        self._jobs: list[Job] = []
        self._texts = [
            TextStream(i, codec, choice.text) for i, choice in enumerate(prepared.choices)
        ]
        self._unfinished = len(self._texts)
        self._error: ApiError | None = None
        self._sink: Sink | None = None
        self._eager = any(choice.text.may_end_early for choice in prepared.choices)
        """Whether each token may end a choice."""
        self.items: list[tuple[int, Output]] = []
        """Outputs of all choices that were not taken in yet."""
        self.is_due = False
        """Whether they will be at the end of this turn."""

    def __enter__(self) -> Self:
        listeners = [_ChoiceListener(self, i) for i in range(len(self._texts))]
        choices = self.prepared.choices
        self._jobs = self._service.submit(self._arrival, self._terms, choices, listeners)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sink = None
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

    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return not self._unfinished or self._error is not None

    def check(self) -> None:
        """Once it is over. Raises ApiError when a choice could not be finished."""
        if self._error is not None:
            raise self._error

    def pipe(self, sink: Sink) -> None:
        """From now on text goes there, what has come already at once."""
        self._sink = sink
        self._eager = self._eager or sink.eager
        self._take_in()

    async def collect(self) -> list[ChoiceResult]:
        """Wait for all choices.

        Raises:
            ApiError: one cannot be finished.
        """
        collector = _Collector(len(self._texts))
        self.pipe(collector)
        await collector.ended.wait()
        self.check()
        return collector.results

    def note(self, output: Output) -> None:
        """This is among the items: see to it that it is taken in, if it has to be."""
        if self._eager or not isinstance(output, NewTokens) or output.finish is not None:
            self.is_due = True
            self._service.turn.put_off(self._take_in)

    def _take_in(self) -> None:
        self.is_due = False
        sink = self._sink
        if sink is None or not self._unfinished or self._error is not None:
            return
        items, self.items = self.items, []
        try:
            batch = [
                delta
                for choice, output in items
                if (delta := self._delta_of(choice, output)) is not None
            ]
            if batch:
                sink.take(batch)
        except Exception as error:  # of this request alone: others are served in the same turn
            log.exception("%s: its output could not be handed on", self._arrival.rid)
            self._error = self._error or internal(
                f"the answer could not be written: {type(error).__name__}", "internal_error"
            )
        if self.is_over():
            sink.end()

    def _delta_of(self, choice: int, output: Output) -> Delta | None:
        text = self._texts[choice]
        if text.finish is not None:  # a stop string was found; nodes did not know yet
            return None
        match output:
            case NewTokens():
                delta = text.feed(output)
                if delta.finish is not None:
                    self._unfinished -= 1
                    if output.finish is None:
                        self._service.cancel([self._jobs[choice]], outcome="stop")
                return delta
            case JobAborted(message):
                self._unfinished -= 1
                return text.abort(message)
            case JobFailed(error):
                self._error = self._error or error
                return None
