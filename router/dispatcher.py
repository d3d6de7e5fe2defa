"""Every unfinished request, and what becomes of it. Pure: facts and times in, effects out.

    submit, cancel, abort, pause, resume          Send(node, message)
    on_tokens, on_retracted, on_failed,    ──▶    Delivery(listener, output)
    on_aborted, on_node_loss, tick                ended jobs, counters

Effects are collected and taken with `drain()`. Order of side effects in each call: the job's state
is settled first, then the other half is told, then the listener hears, then the queue is served, if
something was freed. Nodes get what they have room for (`placement`), the rest waits here.

One mechanism recovers everything: an attempt that ends without finishing is followed by a new one,
in a new room, with the tokens emitted so far. `_replay` alone decides whether, when and where.
"""

from collections import Counter
from collections.abc import Iterable
from random import Random

from common.messages import (
    Abort,
    Adapter,
    Failed,
    FailureKind,
    Incarnation,
    Room,
    SamplingParams,
    TokenOutput,
)
from common.modes import PauseMode
from router.adapters import AdapterCatalogue
from router.admission import Backlog, Demand
from router.attempts import AttemptTable, Gap, generates, in_turn, news_of, outlived
from router.cache_index import CacheIndex
from router.effects import Effects, Send
from router.errors import ApiError, invalid, timed_out
from router.intake import Intake
from router.jobs import JobTable
from router.limits import Limits
from router.node import Loss
from router.nodes import NodeRegistry
from router.picking import Pair
from router.policies import Choose
from router.protocol.terms import DEFAULT_TERMS, Terms, deadline
from router.replay import CAUSE_OF_FAILURE, CAUSE_OF_LOSS, GiveUp, blamed_for, judge
from router.requests import (
    Attempt,
    Job,
    JobAborted,
    JobFailed,
    JobState,
    Listener,
    NewTokens,
    ReplayCause,
)
from router.stranded import StrandedWatch

TOO_LONG = "the request took longer than its time-out"


class Dispatcher:
    """Owner of all jobs."""

    def __init__(
        self,
        registry: NodeRegistry,
        limits: Limits,
        *,
        choose_prefill: Choose,
        choose_decode: Choose,
        random: Random,
        adapters: AdapterCatalogue | None = None,
        cache: CacheIndex | None = None,
    ) -> None:
        """`adapters`: those that jobs may wait for; none if not given. `cache`: what nodes have
        cached, which somebody else keeps up to date."""
        self._registry = registry
        self._limits = limits
        self._random = random
        self.cache = cache if cache is not None else CacheIndex(max_pages=0)
        self.intake = Intake(
            registry,
            limits,
            choose_prefill=choose_prefill,
            choose_decode=choose_decode,
            cache=self.cache,
        )
        self._waiting, self._load = self.intake.waiting, self.intake.load
        self.jobs = JobTable(random)
        self.counters: Counter[str] = Counter()
        self._attempts = AttemptTable(random, self.counters)
        self.paths = self._attempts.paths
        adapters = adapters or AdapterCatalogue()
        self._stranded = StrandedWatch(registry, adapters, limits.node_wait_s)
        self._freed = False
        """Whether nodes may have room since the queue was last served."""
        self._effects = Effects()
        self.paused: PauseMode | None = None
        """The whole cluster's pause; nothing is dispatched."""
        self.replays: Counter[ReplayCause] = Counter()

    # ------------------------------------------------------------ what is asked

    def __len__(self) -> int:
        """Unfinished jobs."""
        return len(self.jobs)

    def unfinished(self) -> tuple[Job, ...]:
        return tuple(self.jobs)

    def check_room_for(self, demand: Demand, priority: int, now: float) -> None:
        """Refuse a request where there is too much work, or where no node could ever take it.

        Raises:
            ApiError: 429 or 503.
        """
        self.intake.check_room_for(demand, priority, len(self.jobs), now)

    def backlog(self) -> Backlog:
        """What a new request of priority 0 would meet."""
        return self.intake.backlog(0)

    def submit(
        self,
        public_rid: str,
        suffix: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        listener: Listener,
        now: float,
        *,
        terms: Terms = DEFAULT_TERMS,
        arrived: float | None = None,
        adapter: Adapter | None = None,
    ) -> Job:
        """Accept one choice; `check_room_for` was asked before. It may be dispatched at once.

        `arrived`: when its HTTP request came, if that was not now.
        """
        job = self.jobs.accept(
            public_rid,
            suffix,
            prompt_ids,
            sampling,
            listener,
            now=now,
            deadline=deadline(arrived or now, terms, self._limits.request_timeout_s),
            terms=terms,
            adapter=adapter,
        )
        self._waiting.put(job)
        if job.deadline <= now:
            self._fail(job, timed_out(TOO_LONG), now)
        self.dispatch(now)
        return job

    def cancel(self, job: Job, now: float, outcome: str = "disconnected") -> None:
        """End a job whose listener wants no more; it hears nothing."""
        if job.state is not JobState.ENDED:
            self._abort_attempt(job)
            self._end(job, outcome, now)
            self._serve(now)

    def abort(self, jobs: Iterable[Job], now: float, message: str) -> int:
        """End jobs on demand; their listeners are told. Returns how many."""
        count = 0
        for job in tuple(jobs):
            if job.state is not JobState.ENDED:
                count += 1
                self._abort_attempt(job)
                self._effects.tell(job, JobAborted(message))
                self._end(job, "abort", now)
        self._serve(now)
        return count

    def fail_all(self, error: ApiError, now: float) -> None:
        """End everything with an error: the router itself goes away."""
        for job in self.unfinished():
            self._abort_attempt(job)
            self._fail(job, error, now)

    def pause(self, mode: PauseMode, now: float) -> None:
        """Dispatch nothing from now on. The nodes' pause is theirs; see `admin`."""
        self.paused = mode
        if mode is PauseMode.ABORT:
            self.abort(self.unfinished(), now, "generation was paused")

    def resume(self, now: float) -> None:
        self.paused = None
        self.dispatch(now)

    # ------------------------------------------------------------ what nodes say

    def on_tokens(self, node: Incarnation, outputs: Iterable[TokenOutput], now: float) -> None:
        """Take in what a step brought for its rooms: each room's tokens in order, each once."""
        for output in outputs:
            found = self._attempts.find(node, output.room)
            if found is None:
                continue
            job, attempt = found
            if job.sampling.prompt_logprobs is None:
                self._take_in(node, output, job, attempt, now)
                continue
            for speaker, said in in_turn(attempt, node, output):
                if job.attempt is attempt:
                    self._take_in(speaker, said, job, attempt, now)
        self._serve(now)

    def _take_in(
        self, node: Incarnation, output: TokenOutput, job: Job, attempt: Attempt, now: float
    ) -> None:
        if output.index == attempt.base and node == attempt.computes:
            job.note_cached(output.cached_tokens)
        if node == attempt.decode:
            attempt.decode_spoke = True
        elif attempt.decode_spoke:
            self.counters["late_prefill_tokens"] += 1
            return
        news = news_of(job, attempt, output)
        match news:
            case NewTokens():
                self._accept(job, attempt, news, output.finish is not None, now)
            case None:
                self.counters["repeated_tokens"] += 1
            case Gap():
                self.counters["token_gaps"] += 1
                self._abort_attempt(job)
                self._replay(job, ReplayCause.GAP, {node}, now, "tokens were lost")

    def _accept(
        self, job: Job, attempt: Attempt, news: NewTokens, node_is_done: bool, now: float
    ) -> None:
        job.note_tokens(news)
        self._load.grew(attempt.room, len(news.token_ids), job.tokens_left)
        if not attempt.first_token:
            attempt.first_token = True
            self.intake.note_prefilled(attempt.room, now)
            self._freed = True
        finish = news.finish or job.complete()
        if finish is None:
            self._effects.tell_tokens(job, news, now)
            return
        self._effects.tell_tokens(job, news.ending(finish), now)
        if not node_is_done:
            self._abort_attempt(job)
        self._end(job, finish.value, now)

    def on_retracted(self, node: Incarnation, room: Room, now: float) -> None:
        """A node gave the room's KV up; the first report of a room counts."""
        found = self._attempts.find(node, room)
        if found is None or outlived(node, found[1]):
            return
        job, _ = found
        self._abort_attempt(job, but=node)
        self._replay(job, ReplayCause.RETRACTED, {node}, now, "its KV was given up")
        self._serve(now)

    def on_failed(self, node: Incarnation, failed: Failed, now: float) -> None:
        """A node cannot finish the room."""
        found = self._attempts.find(node, failed.room)
        if found is None or outlived(node, found[1]):
            return
        job, attempt = found
        self._abort_attempt(job, but=node)
        if failed.kind in (FailureKind.INVALID, FailureKind.TOO_LARGE):
            self._fail(job, invalid(failed.message, None, failed.kind.value), now)
        else:
            blamed = blamed_for(failed.kind, node, attempt)
            self._replay(job, CAUSE_OF_FAILURE[failed.kind], blamed, now, failed.message)
        self._serve(now)

    def on_aborted(self, node: Incarnation, room: Room, now: float) -> None:
        """A node was told to abort the request, by its own HTTP or by another router."""
        found = self._attempts.find(node, room)
        if found is None or outlived(node, found[1]):
            return
        job, _ = found
        self._abort_attempt(job, but=node)
        self._effects.tell(job, JobAborted("aborted by a node"))
        self._end(job, "abort", now)
        self._serve(now)

    def on_node_loss(self, node: Incarnation, loss: Loss, now: float) -> None:
        """All attempts on a node are over, except those that need it no more."""
        for job in self._attempts.depending_on(node, left=loss is Loss.LEFT):
            # After a gap the node is alive and still holds the room; else nobody is there to tell.
            self._abort_attempt(job, but=None if loss is Loss.GAP else node)
            self._replay(job, CAUSE_OF_LOSS[loss], {node}, now, f"a node was lost ({loss})")
        if self._registry.get(node) is None:
            self._load.forget(node)
        self._serve(now)

    def on_heartbeat(self, node: Incarnation, now: float) -> None:
        """The registry has a node's new numbers."""
        heard = self._registry.get(node)
        if heard is not None:
            self._load.heard(heard)
            self.dispatch(now)

    def tick(self, now: float) -> None:
        """Act on what has become due. Call a few times a second."""
        self._waiting.wake(now)
        for job in self.jobs.due(now):
            self._abort_attempt(job)
            self._fail(job, timed_out(TOO_LONG), now)
        self.dispatch(now)
        for job, error in self._stranded.overdue(self.jobs, now, idle=not self._waiting):
            self._fail(job, error, now)

    def drain(self) -> Effects:
        """Take the effects of all calls since the last time."""
        effects = self._effects
        if effects:
            self._effects = Effects()
        return effects

    # ------------------------------------------------------------ dispatch

    def dispatch(self, now: float) -> None:
        """Give waiting jobs to nodes that have room: replays first, then by priority and age."""
        self._freed = False
        if self.paused is None:
            for job, pair in self.intake.startable():
                self._start(job, pair, now)
        running = self.paused is None and bool(self._attempts)
        self.intake.note_work(running=running, now=now)

    def _serve(self, now: float) -> None:
        """Dispatch where something was freed since the last time."""
        if self._freed:
            self.dispatch(now)

    def _start(self, job: Job, pair: Pair, now: float) -> None:
        job.move(JobState.DISPATCHED)
        job.attempts += 1
        job.stranded_since = None
        job.attempt = self._attempts.begin(job, pair.prefill, pair.decode)
        job.times.dispatched = job.times.dispatched or now
        self._load.add(job.attempt.room, job, job.attempt, pair)
        for node, generate in generates(job, job.attempt, self._registry, now):
            self._effects.sends.append(Send(node, generate))

    # ------------------------------------------------------------ ends of attempts

    def _abort_attempt(self, job: Job, but: Incarnation | None = None) -> None:
        """Take the job off its nodes. `but`: this one has already let go."""
        attempt = job.attempt
        if attempt is None:
            return
        for node in attempt.nodes:
            if node != but and self._registry.get(node) is not None:
                self._effects.sends.append(Send(node, Abort(attempt.room)))
        self._forget_attempt(job)

    def _forget_attempt(self, job: Job) -> None:
        if job.attempt is not None:
            self._attempts.end(job.attempt.room)
            self._load.remove(job.attempt.room)
            job.attempt = None
            self._freed = True

    def _replay(
        self, job: Job, cause: ReplayCause, blamed: set[Incarnation], now: float, why: str = ""
    ) -> None:
        """Continue in a new room, now or a little later; or end where enough was tried.

        There is always something left to generate: `_accept` ends a job whose output is complete.
        """
        job.last_fault = why
        verdict = judge(job, cause, why, self._limits.replay, self._random)
        if isinstance(verdict, GiveUp):
            self._fail(job, verdict.error, now)
            return
        job.replays[cause] = job.replays.get(cause, 0) + 1
        self.replays[cause] += 1
        job.avoid |= blamed
        if verdict.wait_s > 0:
            job.move(JobState.BACKING_OFF)
            self._waiting.put_off(job, now + verdict.wait_s)
            return
        job.move(JobState.QUEUED)
        self._waiting.put(job)

    def _fail(self, job: Job, error: ApiError, now: float) -> None:
        self._effects.tell(job, JobFailed(error))
        self._end(job, f"error_{error.status}", now)

    def _end(self, job: Job, outcome: str, now: float) -> None:
        if job.attempts:
            self.intake.admission.note_end(job.held_tokens, now)
        self._forget_attempt(job)
        self._waiting.discard(job)
        job.move(JobState.ENDED)
        job.outcome = outcome
        job.times.ended = now
        self._waiting.sweep()
        self.jobs.remove(job)
        self._effects.ended.append(job)
