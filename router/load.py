"""How busy each node is: what this router has on it, and what it said itself. Pure.

What a node reports beyond this router's own share is others' work (other routers', or rooms that
are being let go). It is compared when the heartbeat comes in, with the book as it is then: both
speak of the same moment, so a report half a second old does not hide that a node has become idle.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from common.messages import Incarnation, Room
from router.node import Node
from router.picking import Pair
from router.policies import Candidate, place_of
from router.recent import RecentWork
from router.requests import Attempt, Job

LOOK_AHEAD_TOKENS = 1024
"""Prompt tokens a node may have waiting at least: two steps of prefill's default chunk."""
LOOK_AHEAD_S = 1.0
"""A faster one may have this many seconds of work waiting."""
LOOK_AHEAD_REQUESTS = 2
"""So many prompts it may always have, however long: one computes, the next is bound to decode."""
BUSY_TOKENS = 512
"""With less than this to compute a prefill node's pace says nothing about what it could do."""

_QUEUES = ("bootstrap", "waiting", "prefilling", "prealloc", "transfer", "running")
"""Of prefill and decode nodes: those in which a request still has something to get there."""


@dataclass(slots=True)
class _Share:
    """What one attempt means to its two nodes, in tokens."""

    computes: Incarnation
    """Who computes the prompt: prefill, or decode where that is alone."""
    decode: Incarnation
    is_local: bool
    to_compute: int
    cached: int
    """The rest of the prompt, as it was when the attempt began."""
    known: int
    held: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt that is done, in tokens."""

    known: int
    computed: int
    """Those that had not been cached where it was computed."""


@dataclass(slots=True)
class _Tally:
    """One node: this router's share, and what others have there."""

    requests: int = 0
    tokens: int = 0
    """Prefill: to be computed. Decode: of KV that exists or is on its way."""
    held: int = 0
    """Decode: with the room to grow."""
    prompts: int = 0
    """Decode: attempts whose prompt it still computes itself."""
    prompt_tokens: int = 0
    """Decode: of these prompts."""
    others_requests: int = 0
    others_tokens: int = 0

    @property
    def all_requests(self) -> int:
        return self.requests + self.others_requests

    @property
    def all_tokens(self) -> int:
        return self.tokens + self.others_tokens


def decode_slots(max_running_requests: int) -> int:
    """Attempts a decode node may have: those that run or come next, and those that wait there for a
    slot without KV.

    As many again keep the batch full also when many requests end together; half as many cost 1-3 %
    of the throughput in the virtual cluster (`tests/unit/scheduler/test_dispatch_pace.py`).
    """
    return 2 * max_running_requests


class LoadBook:
    """Load per node: prefill by what it has to compute, decode by what it holds."""

    def __init__(self) -> None:
        self._shares: dict[Room, _Share] = {}
        self._computing: set[Room] = set()
        self._tallies: dict[Incarnation, _Tally] = {}
        self._recent_prefill, self._recent_decode = RecentWork(), RecentWork()
        self.routed = Counter({"prompt": 0, "computer_cached": 0, "decode_cached": 0})
        """Tokens of all attempts, and those of them that their nodes had cached by the index."""
        self.held_tokens = 0
        """Tokens of KV that this router's attempts want on decode nodes."""
        self.local_tokens = 0
        """Prompt tokens that decode nodes still have to compute for this router."""

    # ------------------------------------------------------------ this router's attempts

    def add(self, room: Room, job: Job, attempt: Attempt, pair: Pair) -> None:
        """An attempt begins."""
        known, held = job.known_tokens, job.held_tokens
        is_local = attempt.prefill is None
        has = pair.computer_has
        to_compute = known - has
        share = _Share(attempt.computes, attempt.decode, is_local, to_compute, has, known, held)
        self._shares[room] = share
        self.routed.update(prompt=known, computer_cached=has, decode_cached=pair.decode_has)
        self._computing.add(room)
        self._count_prompt(share, 1)
        decode = self._tally(share.decode)
        decode.requests += 1
        decode.tokens += share.known
        decode.held += share.held
        self.held_tokens += share.held
        if attempt.prefill is not None:
            self._recent_prefill.give(attempt.prefill, to_compute)
        self._recent_decode.give(attempt.decode, held - pair.decode_has)

    def computed(self, room: Room) -> Prefilled | None:
        """The prompt is done; None if that was known."""
        if room not in self._computing:
            return None
        self._computing.remove(room)
        share = self._shares[room]
        self._count_prompt(share, -1)
        return Prefilled(share.to_compute + share.cached, share.to_compute)

    def _count_prompt(self, share: _Share, sign: int) -> None:
        tally, tokens = self._tally(share.computes), sign * share.to_compute
        if share.is_local:
            tally.prompts += sign
            tally.prompt_tokens += tokens
            self.local_tokens += tokens
        else:
            tally.requests += sign
            tally.tokens += tokens

    def grew(self, room: Room, job: Job) -> None:
        """The attempt has more tokens now."""
        share = self._shares[room]
        tally = self._tallies[share.decode]
        known, held = job.known_tokens, job.held_tokens
        more = held - share.held
        tally.tokens += known - share.known
        tally.held += more
        self.held_tokens += more
        share.known, share.held = known, held

    def remove(self, room: Room) -> None:
        """The attempt is over."""
        self.computed(room)
        share = self._shares.pop(room)
        tally = self._tally(share.decode)
        tally.requests -= 1
        tally.tokens -= share.known
        tally.held -= share.held
        self.held_tokens -= share.held

    # ------------------------------------------------------------ what nodes say

    def heard(self, node: Node) -> None:
        """A heartbeat came: whatever it counts beyond our share is others'.

        Where all requests are ours so are all tokens: a node that has not looked yet what it has
        cached of them counts more than we do.
        """
        tally = self._tally(node.incarnation)
        requests = sum(node.stats.queues.get(queue, 0) for queue in _QUEUES)
        tally.others_requests = max(0, requests - tally.requests)
        others = node.stats.queued_tokens - tally.tokens if tally.others_requests else 0
        tally.others_tokens = max(0, others)

    def forget(self, incarnation: Incarnation) -> None:
        """The node is gone; its attempts were removed."""
        self._tallies.pop(incarnation, None)
        self._recent_prefill.forget(incarnation)
        self._recent_decode.forget(incarnation)

    # ------------------------------------------------------------ what to make of it

    def tokens_to_prefill(self, prefills: Iterable[Node]) -> int:
        """Prompt tokens that these nodes still have to compute, for whomever, and what decode
        nodes compute for this router."""
        ours = self.local_tokens
        return ours + sum(self._tally(node.incarnation).all_tokens for node in prefills)

    def prefill_candidates(self, nodes: Iterable[Node], tokens_per_s: float) -> list[Candidate]:
        """The prefill nodes that take work. `tokens_per_s`: the pace of one."""
        ahead = _look_ahead(tokens_per_s)
        candidates = []
        for node in nodes:
            if node.takes_work:
                tally = self._tally(node.incarnation)
                is_open = tally.all_requests < LOOK_AHEAD_REQUESTS or tally.all_tokens < ahead
                recent = self._recent_prefill.of(node.incarnation)
                candidates.append(_candidate(node, tally.all_tokens, is_open, recent))
        return candidates

    def decode_candidates(self, nodes: Iterable[Node], tokens_per_s: float) -> list[Candidate]:
        """The decode nodes that take work. `tokens_per_s`: at which one computes prompts."""
        ahead = _look_ahead(tokens_per_s)
        candidates = []
        for node in nodes:
            if node.takes_work:
                tally = self._tally(node.incarnation)
                load = tally.held + tally.others_tokens + tally.prompt_tokens
                slots = decode_slots(node.hello.max_running_requests)
                is_open = tally.all_requests < slots and self._has_pages(node, tally)
                computes = tally.prompts < LOOK_AHEAD_REQUESTS or tally.prompt_tokens < ahead
                recent = self._recent_decode.of(node.incarnation)
                candidates.append(_candidate(node, load, is_open, recent, computes))
        return candidates

    @staticmethod
    def _has_pages(node: Node, tally: _Tally) -> bool:
        """Whether not all its pages are wanted yet: one attempt more than fits is let through, so
        that pages which come free find a taker there."""
        return tally.held + tally.others_tokens < node.usable_tokens or not tally.all_requests

    def _tally(self, incarnation: Incarnation) -> _Tally:
        return self._tallies.setdefault(incarnation, _Tally())


def _look_ahead(tokens_per_s: float) -> int:
    """Prompt tokens that may wait on a node which computes so fast."""
    return max(LOOK_AHEAD_TOKENS, int(LOOK_AHEAD_S * tokens_per_s))


def _candidate(
    node: Node, load: int, is_open: bool, recent: float, computes: bool = True
) -> Candidate:
    return Candidate(
        node.incarnation,
        node.hello.fingerprint,
        node.capacity_tokens,
        float(load),
        is_open,
        computes,
        recent,
        place_of(node.hello.name),
    )
