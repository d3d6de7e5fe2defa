"""Pool, prefix cache and manager against a model that knows contents, in any order of events.

The model keeps, for each page, which beginning of a token list its KV belongs to. A page that is
given away while somebody reads it, offered before it is computed, or kept by nobody shows there.
"""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from common.kv_cache.hashing import key
from common.kv_cache.manager import KVCacheManager
from common.messages import Generate, SamplingParams
from common.request import Req

PAGE = 2
Beginning = tuple[int, ...]
"""The tokens of a page and of all pages before it."""


def alike(length: int, different: int) -> list[int]:
    return [0] * length + [1] * different


TOKENS = st.builds(alike, st.integers(1, 9), st.integers(0, 2))
"""Lists that mostly begin alike, so that pages are shared, computed twice and branch."""


def request(room: int, tokens: list[int]) -> Req:
    generate = Generate(
        room=room,
        rid=str(room),
        attempt=1,
        prompt_ids=tokens,
        output_ids=[],
        sampling=SamplingParams(max_tokens=99, seed=1),
    )
    return Req(**Req.fields_of(generate, "r", 0.0))


class CacheMachine(RuleBasedStateMachine):
    """Requests come, compute, grow and end; pages are set aside, doubted and forgotten."""

    @initialize(num_pages=st.integers(4, 14))
    def begin(self, num_pages: int) -> None:
        self.kv = KVCacheManager(num_pages, PAGE, lambda adapter: adapter.encode())
        self.reqs: list[Req] = []
        self.computed: dict[int, int] = {}
        """Room -> positions whose KV is in its pages."""
        self.content: dict[int, Beginning | None] = {}
        """Page -> what its KV belongs to; None while it is being filled."""
        self.known: dict[Beginning, int] = {}
        """Cached beginnings and how many hold each."""
        self.idle: list[Beginning] = []
        """Of these the ones that nobody holds, least recently used first."""
        self.chains: dict[int, list[Beginning]] = {}
        """Room -> the cached beginnings that it holds."""
        self.cut_off: set[int] = set()
        """Rooms that hold pages which were forgotten: what builds on these is not cached."""
        self.told: set[int] = set()
        self.born = 0

    # ------------------------------------------------------------ the model

    def beginnings(self, req: Req, num_tokens: int) -> list[Beginning]:
        tokens = req.context()
        return [tuple(tokens[: end * PAGE]) for end in range(1, num_tokens // PAGE + 1)]

    def set_aside(self) -> set[int]:
        return {page for entry in self.kv._quarantine.values() for page in entry.pages}

    def let_go(self, room: int) -> None:
        self.cut_off.discard(room)
        for beginning in reversed(self.chains.pop(room)):
            self.known[beginning] -= 1
            if not self.known[beginning]:
                self.idle.append(beginning)

    def drop(self, beginnings: set[Beginning]) -> None:
        self.idle = [kept for kept in self.idle if kept not in beginnings]
        for beginning in beginnings:
            del self.known[beginning]
        for room, chain in self.chains.items():
            kept = [beginning for beginning in chain if beginning in self.known]
            if len(kept) < len(chain):
                self.chains[room] = kept
                self.cut_off.add(room)

    # ------------------------------------------------------------ requests

    @precondition(lambda self: len(self.reqs) < 5)
    @rule(tokens=TOKENS, reuse=st.booleans())
    def admit(self, tokens: list[int], reuse: bool) -> None:
        self.born += 1
        req = request(self.born, tokens)
        hits: list[Beginning] = []
        for beginning in self.beginnings(req, len(tokens) - 1) if reuse else ():
            if beginning not in self.known:
                break
            hits.append(beginning)
        free, order = self.kv.num_free, list(self.idle)
        costs = self.kv.pages_for(len(tokens)) - sum(1 for hit in hits if self.known[hit])
        assert self.kv.pages_to_admit(req, len(tokens), reuse=reuse) == costs
        got = self.kv.admit(req, len(tokens), reuse=reuse)
        if costs > free:
            assert got is None, "there were too few pages"
            assert (self.kv.num_free, self.idle, req.pages, req.chain) == (free, order, [], [])
            return
        assert got == len(hits) * PAGE
        assert self.kv.num_free == free - costs
        for hit in hits:
            if not self.known[hit]:
                self.idle.remove(hit)
            self.known[hit] += 1
        self.chains[req.room] = hits
        self.computed[req.room] = got
        for page, hit in zip(req.pages, hits, strict=False):
            assert self.content[page] == hit, "a hit holds what it is a hit for"
        fresh = req.pages[len(hits) :]
        self.reqs.append(req)
        self.evict_for(fresh, hits)

    def evict_for(self, fresh: list[int], hits: list[Beginning]) -> None:
        """Pages were given away: whatever was in them is no more."""
        for page in fresh:
            self.content[page] = None
        gone = len(self.known) - self.kv.num_cached
        assert gone >= 0
        for _ in range(gone):
            evicted = self.idle.pop(0)
            assert evicted not in hits
            del self.known[evicted]
        others = {page for req in self.reqs for page in req.pages} | self.set_aside()
        if gone:
            assert self.kv.num_pages == len(others) + len(self.idle), "evicted though some was free"

    @precondition(lambda self: self.reqs)
    @rule(data=st.data(), more=st.integers(0, 6))
    def compute(self, data: st.DataObject, more: int) -> None:
        """Some positions more, and they are offered to others."""
        req = data.draw(st.sampled_from(self.reqs))
        end = min(self.computed[req.room] + more, req.num_tokens, len(req.pages) * PAGE)
        before, self.computed[req.room] = self.computed[req.room], end
        beginnings = self.beginnings(req, end)
        for index in range(before // PAGE, len(beginnings)):
            self.content[req.pages[index]] = beginnings[index]
        chain = self.chains[req.room]
        self.kv.publish(req, end)
        if req.room in self.cut_off:
            return
        for beginning in beginnings[len(chain) :]:
            if self.known.setdefault(beginning, 0) == 0 and beginning in self.idle:
                self.idle.remove(beginning)
            self.known[beginning] += 1
            chain.append(beginning)

    @precondition(lambda self: self.reqs)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        req = data.draw(st.sampled_from(self.reqs))
        if self.computed[req.room] < req.num_tokens:
            return
        req.output_ids.append(token)
        free = self.kv.num_free
        added = self.kv.grow(req, req.num_tokens)
        if added is None:
            assert free == 0
            req.output_ids.pop()
        else:
            self.evict_for(added, [])

    @precondition(lambda self: self.reqs)
    @rule(data=st.data())
    def look_again(self, data: st.DataObject) -> None:
        """Before anything is computed."""
        req = data.draw(st.sampled_from(self.reqs))
        chain = self.chains[req.room]
        if self.computed[req.room] != len(chain) * PAGE or req.room in self.cut_off:
            return
        for beginning in self.beginnings(req, req.num_tokens - 1)[len(chain) :]:
            if beginning not in self.known:
                break
            if not self.known[beginning]:
                self.idle.remove(beginning)
            self.known[beginning] += 1
            chain.append(beginning)
        self.computed[req.room] = self.kv.extend_hit(req)
        assert self.computed[req.room] == len(chain) * PAGE

    @precondition(lambda self: self.reqs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        req = data.draw(st.sampled_from(self.reqs))
        self.reqs.remove(req)
        self.let_go(req.room)
        self.kv.release(req)

    # ------------------------------------------------------------ faults

    @precondition(lambda self: self.reqs)
    @rule(data=st.data())
    def lose_its_peer(self, data: st.DataObject) -> None:
        """While its KV arrives: it has published nothing."""
        req = data.draw(st.sampled_from(self.reqs))
        if self.computed[req.room] != len(self.chains[req.room]) * PAGE:
            return
        if req.room in self.cut_off or any(
            page != e.page for page, e in zip(req.pages, req.chain, strict=False)
        ):
            return
        self.reqs.remove(req)
        self.let_go(req.room)
        self.kv.quarantine(req, "p")

    @rule()
    def hear_of_the_peer(self) -> None:
        for room in self.kv.quarantined_rooms("p"):
            assert self.kv.end_quarantine(room, "p")

    @rule()
    def clear(self) -> None:
        self.kv.clear_cache()
        self.drop(set(self.known))

    @rule(data=st.data())
    def doubt(self, data: st.DataObject) -> None:
        """A stray write: those that hold the page end."""
        page = data.draw(st.integers(0, self.kv.num_pages - 1))
        entries = self.kv._cache._entries.values()
        roots = {self.content[e.page] for e in entries if page in (e.page, *e.spares)}
        doubtful = {b for b in self.known for root in roots if root and b[: len(root)] == root}
        assert self.kv.forget_pages([page]) == len(doubtful)
        self.drop(doubtful)
        for req in [req for req in self.reqs if page in req.pages]:
            self.reqs.remove(req)
            self.let_go(req.room)
            self.kv.release(req)

    # ------------------------------------------------------------ what always holds

    @invariant()
    def everything_is_in_one_place(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check(self.reqs)
        used = {page for req in self.reqs for page in req.pages} | self.set_aside()
        assert self.kv.num_free == self.kv.num_pages - len(used)

    @invariant()
    def what_is_read_is_what_was_computed(self) -> None:
        for req in getattr(self, "reqs", []):
            for page, beginning in zip(
                req.pages, self.beginnings(req, self.computed[req.room]), strict=False
            ):
                assert self.content[page] == beginning

    @invariant()
    def the_cache_is_what_the_model_says(self) -> None:
        if not hasattr(self, "kv"):
            return
        cache = self.kv._cache
        assert {self.content[e.page] for e in cache._entries.values()} == set(self.known)
        assert [self.content[entry.page] for entry in cache._idle] == self.idle
        for entry in cache._entries.values():
            beginning = self.content[entry.page]
            assert beginning is not None
            assert entry.refs + len(entry.spares) == self.known[beginning]

    @invariant()
    def routers_know_it(self) -> None:
        if not hasattr(self, "kv"):
            return
        change = self.kv.take_changes()
        if change is not None:
            if change.cleared:
                self.told.clear()
            assert self.told.issuperset(change.evicted)
            self.told -= set(change.evicted)
            assert self.told.isdisjoint(change.stored)
            self.told |= set(change.stored)
        assert self.told == {key(page_hash) for page_hash in self.kv._cache._entries}


ORDERLY = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
"""No time limit of any kind: other work on the machine is no fault of the cache."""


def test_any_order_of_events() -> None:
    run_state_machine_as_test(CacheMachine, settings=ORDERLY)
