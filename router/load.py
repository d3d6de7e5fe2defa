"""How busy each node is: what this router has on it, and what it said itself. Pure.

What a node reports beyond this router's own share is others' work (other routers', or rooms that
are being let go). It is compared when the heartbeat comes in, with the book as it is then: both
speak of the same moment, so a report half a second old does not hide that a node has become idle.
"""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass

import msgspec

from common.messages import Fingerprint, Incarnation, Room
from common.modes import DisaggregationMode
from router.node import Node
from router.picking import Pair
from router.policies import Candidate, place_of
from router.recent import RecentWork
from router.requests import Attempt, Job, held_tokens

LOOK_AHEAD_TOKENS = 1024
"""Prompt tokens a node may have waiting at least: two steps of prefill's default chunk."""
LOOK_AHEAD_S = 1.0
"""A faster one may have this many seconds of work waiting."""
LOOK_AHEAD_REQUESTS = 2
"""So many prompts it may always have, however long: one computes, the next is bound to decode."""
AHEAD_TOLERANCE = 0.05
"""The pace is measured all the time; smaller changes of it are no news for every node."""
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


class Prefilled(msgspec.Struct, frozen=True):
    """A prompt that is done, in tokens."""

    known: int
    computed: int
    """Those that had not been cached where it was computed."""


@dataclass(slots=True, eq=False)
class _Tally(ABC):
    """One node: this router's share, and what others have there."""

    node: Node
    candidate: Candidate
    """What policies see of it; brought up to date by `refresh`."""
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

    @abstractmethod
    def refresh(self, ahead: int) -> int:
        """Bring the candidate up to date; returns by how much its prompts' tokens have grown.
        `ahead`: prompt tokens that may wait on a node."""


class _PrefillTally(_Tally):
    def refresh(self, ahead: int) -> int:
        seen, tokens = self.candidate, self.all_tokens
        growth = tokens - int(seen.load)
        seen.load = tokens
        seen.is_open = self.all_requests < LOOK_AHEAD_REQUESTS or tokens < ahead
        return growth


class _DecodeTally(_Tally):
    def refresh(self, ahead: int) -> int:
        seen = self.candidate
        seen.load = self.held + self.others_tokens + self.prompt_tokens
        slots = decode_slots(self.node.hello.max_running_requests)
        seen.is_open = self.all_requests < slots and has_pages(self)
        seen.computes = self.prompts < LOOK_AHEAD_REQUESTS or self.prompt_tokens < ahead
        return 0


_TALLIES = {
    DisaggregationMode.PREFILL: _PrefillTally,
    DisaggregationMode.DECODE: _DecodeTally,
}


def has_pages(tally: _Tally) -> bool:
    """Whether not all pages of a decode node are wanted yet: one attempt more than fits is let
    through, so that pages which come free find a taker there."""
    wanted = tally.held + tally.others_tokens
    return wanted < tally.node.usable_tokens or not tally.all_requests


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
        self._stale: set[_Tally] = set()
        """Those whose candidate is not up to date: tokens change them far oftener than anybody
        looks."""
        self._kinds: dict[Fingerprint, int] = {}
        self._recent = {role: RecentWork() for role in DisaggregationMode}
        self._ahead = LOOK_AHEAD_TOKENS
        self._queued_tokens = 0
        """Of all prefill nodes' candidates."""
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
        self.routed["prompt"] += known
        self.routed["computer_cached"] += has
        self.routed["decode_cached"] += pair.decode_has
        self._computing.add(room)
        self._count_prompt(share, 1)
        decode = self._changing(share.decode)
        decode.requests += 1
        decode.tokens += share.known
        decode.held += share.held
        self.held_tokens += share.held
        if not is_local:
            self._give(share.computes, to_compute)
        self._give(share.decode, held - pair.decode_has)

    def _give(self, incarnation: Incarnation, tokens: int) -> None:
        tally = self._tallies[incarnation]
        self._recent[tally.node.role].give(tally.candidate, tokens)

    def computed(self, room: Room) -> Prefilled | None:
        """The prompt is done; None if that was known."""
        if room not in self._computing:
            return None
        self._computing.remove(room)
        share = self._shares[room]
        self._count_prompt(share, -1)
        return Prefilled(share.to_compute + share.cached, share.to_compute)

    def _count_prompt(self, share: _Share, sign: int) -> None:
        tally, tokens = self._changing(share.computes), sign * share.to_compute
        if share.is_local:
            tally.prompts += sign
            tally.prompt_tokens += tokens
            self.local_tokens += tokens
        else:
            tally.requests += sign
            tally.tokens += tokens

    def grew(self, room: Room, count: int, left: int) -> None:
        """The attempt has `count` tokens more now, and may get `left`."""
        share = self._shares[room]
        tally = self._changing(share.decode)
        tally.tokens += count
        share.known += count
        more = held_tokens(share.known, left) - share.held
        if more:
            tally.held += more
            self.held_tokens += more
            share.held += more

    def remove(self, room: Room) -> None:
        """The attempt is over."""
        self.computed(room)
        share = self._shares.pop(room)
        tally = self._changing(share.decode)
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
        tally = self._tally_of(node)
        self._stale.add(tally)
        requests = sum(node.stats.queues.get(queue, 0) for queue in _QUEUES)
        tally.others_requests = max(0, requests - tally.requests)
        others = node.stats.queued_tokens - tally.tokens if tally.others_requests else 0
        tally.others_tokens = max(0, others)

    def forget(self, incarnation: Incarnation) -> None:
        """The node is gone; its attempts were removed."""
        tally = self._tallies.pop(incarnation, None)
        if tally is not None:
            tally.others_tokens = tally.others_requests = 0
            self._queued_tokens += tally.refresh(self._ahead)
            self._stale.discard(tally)
            self._recent[tally.node.role].forget(tally.candidate)

    # ------------------------------------------------------------ what to make of it

    def settle(self, tokens_per_s: float) -> None:
        """Bring all candidates up to date. `tokens_per_s`: at which a node computes prompts."""
        self._recent[DisaggregationMode.PREFILL].pace(tokens_per_s)
        ahead = max(LOOK_AHEAD_TOKENS, int(LOOK_AHEAD_S * tokens_per_s))
        if abs(ahead - self._ahead) > self._ahead * AHEAD_TOLERANCE:
            self._ahead = ahead
            self._stale.update(self._tallies.values())
        self._refresh()

    def _refresh(self) -> None:
        for tally in self._stale:
            self._queued_tokens += tally.refresh(self._ahead)
        self._stale.clear()

    def candidate(self, node: Node) -> Candidate:
        """A node as policies see it: the same object until it is forgotten."""
        return self._tally_of(node).candidate

    def kind(self, fingerprint: Fingerprint) -> int:
        """A number for a kind of pages: quicker to compare."""
        return self._kinds.setdefault(fingerprint, len(self._kinds))

    @property
    def tokens_to_prefill(self) -> int:
        """Prompt tokens that prefill nodes still have to compute, for whomever, and what decode
        nodes compute for this router."""
        self._refresh()
        return self.local_tokens + self._queued_tokens

    def _changing(self, incarnation: Incarnation) -> _Tally:
        tally = self._tallies[incarnation]
        self._stale.add(tally)
        return tally

    def _tally_of(self, node: Node) -> _Tally:
        tally = self._tallies.get(node.incarnation)
        if tally is None:
            candidate = Candidate(node.incarnation, self.kind(node.hello.fingerprint), 0)
            tally = self._tallies[node.incarnation] = _TALLIES[node.role](node, candidate)
            self._recent[node.role].join(candidate)
            self._take(tally, node)
        elif tally.node is not node:
            self._take(tally, node)
        return tally

    def _take(self, tally: _Tally, node: Node) -> None:
        """It has greeted, perhaps with other numbers than before."""
        tally.node = node
        tally.candidate.kind = self.kind(node.hello.fingerprint)
        tally.candidate.capacity_tokens = node.capacity_tokens
        tally.candidate.place = place_of(node.hello.name)
        self._stale.add(tally)
