"""Every unfinished request, and what becomes of it. Pure: facts and times in, effects out.

    submit, cancel, abort, pause, resume          Send(node, message)
    on_tokens, on_retracted, on_failed,    ──▶    Delivery(listener, output)
    on_aborted, on_node_loss, tick                ended jobs, counters

Effects are collected and taken with `drain()`. Order of side effects in each call: the job's state
is settled first, then the other half is told, then the listener hears, then the queue is served.

One mechanism recovers everything: an attempt that ends without finishing is followed by a new one,
in a new room, with the tokens emitted so far. `_replay` alone decides whether, when and where.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from common.messages import (
    Abort,
    Failed,
    FailureKind,
    Incarnation,
    Room,
    SamplingParams,
    TokenOutput,
)
from common.modes import DisaggregationMode, PauseMode
from router.attempts import Gap, generate_pair, news_of
from router.effects import Delivery, Effects, Send
from router.errors import ApiError, invalid, timed_out, too_busy, unavailable
from router.load import LoadBook
from router.nodes import Loss, NodeRegistry
from router.policies import Choose, Pair, pick_pair
from router.replay import CAUSE_OF_FAILURE, CAUSE_OF_LOSS, GiveUp, ReplayLimits, blamed_for, judge
from router.requests import (
    Attempt,
    Job,
    JobAborted,
    JobFailed,
    JobState,
    Listener,
    NewTokens,
    Output,
    ReplayCause,
    Timeline,
)
from router.stranded import StrandedWatch
from router.waiting import WaitingRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the dispatcher; see `RouterConfig`."""

    max_requests: int = 4096
    node_wait_s: float = 30.0
    request_timeout_s: float = 3600.0
    replay: ReplayLimits = field(default_factory=ReplayLimits)


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
    ) -> None:
        self._registry = registry
        self._limits = limits
        self._choose_prefill = choose_prefill
        self._choose_decode = choose_decode
        self._random = random
        self._load = LoadBook()
        self._jobs: dict[str, Job] = {}
        self._rooms: dict[Room, Job] = {}
        self._waiting = WaitingRoom()
        self._accepted = 0
        self._stranded = StrandedWatch(registry, limits.node_wait_s)
        self._effects = Effects()
        self.paused: PauseMode | None = None
        """The whole cluster's pause; nothing is dispatched."""
        self.counters: Counter[str] = Counter()
        self.replays: Counter[ReplayCause] = Counter()

    # ------------------------------------------------------------ what is asked

    def __len__(self) -> int:
        """Unfinished jobs."""
        return len(self._jobs)

    def count(self, state: JobState) -> int:
        return sum(1 for job in self._jobs.values() if job.state is state)

    def unfinished(self) -> tuple[Job, ...]:
        return tuple(self._jobs.values())

    def check_room_for(self, count: int) -> None:
        """Refuse `count` more jobs where there are too many, or where no node could take them.

        Raises:
            ApiError: 429 or 503.
        """
        if len(self._jobs) + count > self._limits.max_requests:
            raise too_busy(f"{len(self._jobs)} requests are unfinished; try again later")
        missing = self._registry.missing()
        if missing is not None:
            raise unavailable(missing)

    def submit(
        self,
        public_rid: str,
        suffix: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        listener: Listener,
        now: float,
    ) -> Job:
        """Accept one choice; `check_room_for` was asked before. It may be dispatched at once."""
        rid = public_rid + suffix
        while rid in self._jobs:  # a client may use a name twice; nodes must not see it twice
            rid = f"{public_rid}{suffix}~{self._random.getrandbits(32):08x}"
        self._accepted += 1
        deadline = now + self._limits.request_timeout_s
        job = Job(
            rid, public_rid, self._accepted, prompt_ids, sampling, listener, deadline, Timeline(now)
        )
        self._jobs[rid] = job
        self._waiting.put(job)
        self.dispatch(now)
        return job

    def cancel(self, job: Job, now: float, outcome: str = "disconnected") -> None:
        """End a job whose listener wants no more; it hears nothing."""
        if job.state is not JobState.ENDED:
            self._abort_attempt(job)
            self._end(job, outcome, now)

    def abort(self, jobs: Iterable[Job], now: float, message: str) -> int:
        """End jobs on demand; their listeners are told. Returns how many."""
        count = 0
        for job in tuple(jobs):
            if job.state is not JobState.ENDED:
                count += 1
                self._abort_attempt(job)
                self._deliver(job, JobAborted(message))
                self._end(job, "abort", now)
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

    def on_tokens(self, node: Incarnation, output: TokenOutput, now: float) -> None:
        """Take in new tokens of one room: in order, each once."""
        found = self._attempt_of(node, output.room)
        if found is None:
            return
        job, attempt = found
        if node == attempt.decode:
            attempt.decode_spoke = True
        elif attempt.decode_spoke:
            job.note_cached(output.cached_tokens)
            self.counters["late_prefill_tokens"] += 1
            return
        else:
            job.note_cached(output.cached_tokens)
        news = news_of(job, attempt, output)
        match news:
            case None:
                self.counters["repeated_tokens"] += 1
            case Gap():
                self.counters["token_gaps"] += 1
                self._abort_attempt(job)
                self._replay(job, ReplayCause.GAP, {node}, now, "tokens were lost")
            case NewTokens():
                self._accept(job, attempt, news, output.finish is not None, now)

    def _accept(
        self, job: Job, attempt: Attempt, news: NewTokens, node_is_done: bool, now: float
    ) -> None:
        job.output_ids.extend(news.token_ids)
        if not attempt.first_token:
            attempt.first_token = True
            self._load.computed(attempt.room)
        finish = news.finish or job.complete()
        self._deliver_tokens(job, NewTokens(news.token_ids, news.logprobs, finish), now)
        if finish is None:
            return
        if not node_is_done:
            self._abort_attempt(job)
        self._end(job, finish.value, now)

    def on_retracted(self, node: Incarnation, room: Room, now: float) -> None:
        """A node gave the room's KV up; the first report of a room counts."""
        found = self._attempt_of(node, room)
        if found is None or self._outlived(node, found[1]):
            return
        job, attempt = found
        self._abort_attempt(job, but=node)
        if node == attempt.decode:  # prefill still has the prefix; if it retracts, it is paused
            job.prefer = attempt.prefill
        self._replay(job, ReplayCause.RETRACTED, {node}, now)

    def on_failed(self, node: Incarnation, failed: Failed, now: float) -> None:
        """A node cannot finish the room."""
        found = self._attempt_of(node, failed.room)
        if found is None or self._outlived(node, found[1]):
            return
        job, attempt = found
        self._abort_attempt(job, but=node)
        if failed.kind in (FailureKind.INVALID, FailureKind.TOO_LARGE):
            self._fail(job, invalid(failed.message, None, failed.kind.value), now)
            return
        blamed = blamed_for(failed.kind, node, attempt)
        self._replay(job, CAUSE_OF_FAILURE[failed.kind], blamed, now, failed.message)

    def on_aborted(self, node: Incarnation, room: Room, now: float) -> None:
        """A node was told to abort the request, by its own HTTP or by another router."""
        found = self._attempt_of(node, room)
        if found is None or self._outlived(node, found[1]):
            return
        job, _ = found
        self._abort_attempt(job, but=node)
        self._deliver(job, JobAborted("aborted by a node"))
        self._end(job, "abort", now)

    def on_node_loss(self, node: Incarnation, loss: Loss, now: float) -> None:
        """All attempts on a node are over, except those that need it no more."""
        affected = [
            job
            for job in self._rooms.values()
            if job.attempt is not None
            and node in (job.attempt.prefill, job.attempt.decode)
            and not self._outlived(node, job.attempt)
        ]
        for job in sorted(affected, key=lambda job: job.rank):
            # After a gap the node is alive and still holds the room; else nobody is there to tell.
            self._abort_attempt(job, but=None if loss is Loss.GAP else node)
            self._replay(job, CAUSE_OF_LOSS[loss], {node}, now, f"a node was lost ({loss})")

    def tick(self, now: float) -> None:
        """Act on what has become due. Call a few times a second."""
        self._waiting.wake(now)
        for job in [job for job in self._jobs.values() if job.deadline <= now]:
            self._abort_attempt(job)
            self._fail(job, timed_out("the request took too long"), now)
        self.dispatch(now)
        for job in self._stranded.overdue(self._jobs.values(), now, idle=not self._waiting):
            why = self._registry.missing() or "no node that is left can hold the request"
            self._fail(job, unavailable(why), now)

    def drain(self) -> Effects:
        """Take the effects of all calls since the last time."""
        effects, self._effects = self._effects, Effects()
        return effects

    # ------------------------------------------------------------ dispatch

    def dispatch(self, now: float) -> None:
        """Give waiting jobs to nodes, replays first, each group in order of acceptance."""
        if self.paused is not None or not self._waiting:
            return
        left: list[Job] = []
        for job in self._waiting.take_ready():
            prefills = self._load.candidates(self._registry.of_role(DisaggregationMode.PREFILL))
            decodes = self._load.candidates(self._registry.of_role(DisaggregationMode.DECODE))
            pair = pick_pair(
                prefills,
                decodes,
                tokens=job.max_total_tokens,
                avoid=job.avoid,
                prefer=job.prefer,
                choose_prefill=self._choose_prefill,
                choose_decode=self._choose_decode,
            )
            if pair is not None:
                self._start(job, pair, now)
                continue
            left.append(job)
            if not prefills or not decodes:
                break
        for job in left:
            self._waiting.put(job)

    def _start(self, job: Job, pair: Pair, now: float) -> None:
        room = 0
        while room == 0 or room in self._rooms:
            room = self._random.getrandbits(63)
        job.move(JobState.DISPATCHED)
        job.attempts += 1
        job.stranded_since = None
        job.prefer = None
        job.attempt = Attempt(room, pair.prefill, pair.decode, base=len(job.output_ids))
        job.times.dispatched = job.times.dispatched or now
        self._rooms[room] = job
        self._load.add(room, job, job.attempt)
        prefill = self._registry.get(pair.prefill)
        assert prefill is not None
        for_prefill, for_decode = generate_pair(job, job.attempt, prefill.hello.side_channel, now)
        self._effects.sends += (Send(pair.prefill, for_prefill), Send(pair.decode, for_decode))

    # ------------------------------------------------------------ ends of attempts

    def _abort_attempt(self, job: Job, but: Incarnation | None = None) -> None:
        """Take the job off its nodes. `but`: this one has already let go."""
        attempt = job.attempt
        if attempt is None:
            return
        for node in (attempt.prefill, attempt.decode):
            if node != but and self._registry.get(node) is not None:
                self._effects.sends.append(Send(node, Abort(attempt.room)))
        self._forget_attempt(job)

    def _forget_attempt(self, job: Job) -> None:
        if job.attempt is not None:
            del self._rooms[job.attempt.room]
            self._load.remove(job.attempt.room)
            job.attempt = None

    def _replay(
        self, job: Job, cause: ReplayCause, blamed: set[Incarnation], now: float, why: str = ""
    ) -> None:
        """Continue in a new room, now or a little later; or end where enough was tried.

        There is always something left to generate: `_accept` ends a job whose output is complete.
        """
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
        self.dispatch(now)

    def _fail(self, job: Job, error: ApiError, now: float) -> None:
        self._deliver(job, JobFailed(error))
        self._end(job, f"error_{error.status}", now)

    def _end(self, job: Job, outcome: str, now: float) -> None:
        self._forget_attempt(job)
        job.move(JobState.ENDED)
        job.outcome = outcome
        job.times.ended = now
        del self._jobs[job.rid]
        self._effects.ended.append(job)

    # ------------------------------------------------------------ small things

    def _attempt_of(self, node: Incarnation, room: Room) -> tuple[Job, Attempt] | None:
        """The live attempt that this node speaks of, or None (stale, and counted)."""
        job = self._rooms.get(room)
        attempt = None if job is None else job.attempt
        if job is None or attempt is None or node not in (attempt.prefill, attempt.decode):
            self.counters["stale_rooms"] += 1
            return None
        return job, attempt

    @staticmethod
    def _outlived(node: Incarnation, attempt: Attempt) -> bool:
        """Whether the attempt does not need this node any more."""
        return attempt.decode_spoke and node == attempt.prefill

    def _deliver(self, job: Job, output: Output) -> None:
        self._effects.deliveries.append(Delivery(job, output))

    def _deliver_tokens(self, job: Job, output: NewTokens, now: float) -> None:
        times = job.times
        before = times.accepted if times.last_token is None else times.last_token
        delivery = Delivery(job, output, now - before, first=times.first_token is None)
        self._effects.deliveries.append(delivery)
        times.first_token = now if times.first_token is None else times.first_token
        times.last_token = now
