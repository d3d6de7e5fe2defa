"""Which grammars are let in: each is tried out in another process before a node hears of it.

What the trial may cost is bounded there (`common/grammar/check_server.py`), so a hostile grammar
costs its own request half a second of somebody else's processor, and this process nothing. Verdicts
are kept: an application sends the same schema with each request.
"""

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter, OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec.structs import replace

from common.grammar.limits import MAX_GRAMMAR_CHARACTERS
from common.grammar.questions import Answer, Question
from common.messages import Grammar
from router.errors import invalid, unavailable
from router.protocol.grammars import Wish
from router.protocol.knobs import Knobs

log = logging.getLogger("router.grammars")

MAX_VERDICTS = 256
"""Kept; at most 32 MiB of text with the grammars they are about."""
AT_ONCE = 2
"""Trials; more wait."""
MAX_LINE_BYTES = 1 << 20
CLOSE_S = 2.0
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Answer).decode


class Grammars(Protocol):
    """Whoever knows which grammars nodes can compile."""

    async def checked(self, grammar: Grammar, field: str) -> Grammar:
        """The grammar as nodes take it.

        Raises:
            ApiError: 400 naming `field` if they cannot, 503 if that could not be found out.
        """
        ...


async def with_grammar(knobs: Knobs, wish: Wish | None, grammars: Grammars) -> Knobs:
    """`knobs` with the grammar that was asked for, once it is known to compile.

    Raises:
        ApiError: as `Grammars.checked`.
    """
    if wish is None:
        return knobs
    return replace(knobs, grammar=await grammars.checked(wish.grammar, wish.field))


class _NoAnswer(Exception):
    """The checker ended before it had answered."""


class GrammarChecks:
    """The router's side of its checker, which is started when it is first needed."""

    def __init__(self, folder: Path, vocab_size: int, timeout_s: float) -> None:
        self._command = ["-m", "common.grammar.check_server", str(folder), str(vocab_size)]
        self._timeout_s = timeout_s
        self._verdicts: OrderedDict[Grammar, Answer] = OrderedDict()
        self._asking: dict[Grammar, asyncio.Task[Answer | None]] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self.num_trials = 0
        self.counts = Counter({"accepted": 0, "refused": 0, "unanswered": 0, "remembered": 0})
        """Grammars that clients sent: by what came of their trial, or known from an earlier one."""

    async def checked(self, grammar: Grammar, field: str) -> Grammar:
        """See `Grammars`. Time spent waiting for others' trials counts."""
        if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
            self.counts["refused"] += 1
            message = f"{field} has more than {MAX_GRAMMAR_CHARACTERS} characters"
            raise invalid(message, field, "grammar_too_large")
        verdict = self._verdicts.get(grammar)
        if verdict is None:
            verdict = await self._find_out(grammar)
        else:
            self.counts["remembered"] += 1
            self._verdicts.move_to_end(grammar)
        if verdict.grammar is None:
            raise invalid(f"{field}: {verdict.problem}", field, "invalid_grammar")
        return verdict.grammar

    async def close(self) -> None:
        """End the checker and whoever waits for it."""
        for task in self._asking.values():
            task.cancel()
        process, self._process = self._process, None
        if process is None or self._reader is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), CLOSE_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        await self._reader
        with suppress(ConnectionError):  # the pipe's own end, before that of the event loop
            await process.stdin.wait_closed()

    # ------------------------------------------------------------ asking

    async def _find_out(self, grammar: Grammar) -> Answer:
        """One trial for all that want the same grammar now; a client that leaves ends none."""
        task = self._asking.get(grammar)
        if task is None:
            task = asyncio.create_task(self._try_out(grammar))
            self._asking[grammar] = task
        answer = await asyncio.shield(task)
        if answer is None:
            self.counts["unanswered"] += 1
            raise unavailable("the grammar could not be checked", "grammar_check")
        self.counts["refused" if answer.grammar is None else "accepted"] += 1
        return answer

    async def _try_out(self, grammar: Grammar) -> Answer | None:
        """None if no answer could be had. Raises nothing: perhaps nobody waits any more."""
        try:
            async with asyncio.timeout(self._timeout_s), self._turns:
                answer = await self._ask(grammar)
        except TimeoutError:
            log.warning("no verdict about a grammar within %g s", self._timeout_s)
            return None
        except (_NoAnswer, OSError) as error:
            log.warning("no verdict about a grammar: %s", error or type(error).__name__)
            return None
        finally:
            del self._asking[grammar]
        self._verdicts[grammar] = answer
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return answer

    async def _ask(self, grammar: Grammar) -> Answer:
        process = await self._started()
        assert process.stdin is not None
        self.num_trials += 1
        number = self.num_trials
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            process.stdin.write(_encode(Question(number, grammar)) + b"\n")
            await process.stdin.drain()
            return await answer
        finally:
            self._waiting.pop(number, None)

    # ------------------------------------------------------------ the checker

    async def _started(self) -> Process:
        async with self._starting:
            if self._process is None:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *self._command, stdin=PIPE, stdout=PIPE, limit=MAX_LINE_BYTES
                )
                self._process = process
                self._reader = asyncio.create_task(self._read(process))
            return self._process

    async def _read(self, process: Process) -> None:
        """Hand out answers until the checker ends, by itself or since it is closed."""
        assert process.stdout is not None
        with suppress(ValueError, msgspec.DecodeError):  # no line that it can have meant
            while line := await process.stdout.readline():
                self._take_in(_decode(line))
        if self._process is process:
            self._process = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_NoAnswer("the checker has ended"))
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def _take_in(self, answer: Answer) -> None:
        waiting = self._waiting.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
