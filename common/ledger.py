"""What a scheduler counts and times, until the loop takes it away for logs and metrics."""

from collections import Counter

from common.messages import NodeStats
from common.request import Req
from common.stats import Report, RequestEnd, StageSample


class Ledger:
    """Monotonic counters, stage samples and ends of requests."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._samples: list[StageSample] = []
        self._ends: list[RequestEnd] = []
        self._transferred: list[tuple[int, float]] = []

    def mark(self, req: Req, stage: str, now: float) -> None:
        """Stamp a stage's end and sample how long it took since the one before."""
        since = max(req.stages.values(), default=req.added)
        req.stages[stage] = now
        self._samples.append(StageSample(stage, now - since))

    def waited(self, stage: str, seconds: float) -> None:
        """How long a request was held up, beside its stages."""
        self._samples.append(StageSample(stage, seconds))

    def token(self, req: Req, now: float) -> None:
        """One more token was generated here."""
        self.counters["generated_tokens"] += 1
        if req.last_token_at is not None:
            self._samples.append(StageSample("inter_token", now - req.last_token_at))
        req.last_token_at = now

    def ended(self, req: Req, outcome: str) -> None:
        self._ends.append(
            RequestEnd(
                room=req.room,
                rid=req.rid,
                attempt=req.attempt,
                outcome=outcome,
                prompt_tokens=len(req.prompt_ids),
                output_tokens=len(req.output_ids),
                stages={name: at - req.added for name, at in req.stages.items()},
                adapter="" if req.adapter is None else req.adapter.name,
            )
        )

    def transferred(self, num_bytes: int, seconds: float) -> None:
        self.counters["transferred_bytes"] += num_bytes
        self._transferred.append((num_bytes, seconds))

    def take(self, stats: NodeStats) -> Report:
        """Everything since the last call, beside a snapshot of now."""
        report = Report(stats, self._samples, self._ends, self._transferred)
        self._samples, self._ends, self._transferred = [], [], []
        return report
