"""Stand-ins for a node's body in scheduler tests: KV memory, a deterministic model, a fabric.

KV content is modelled exactly: the KV of a position is a hash over all tokens up to it, computed
from what the page table says the position before holds. A page that is freed too early, written
late or read too soon therefore changes tokens, as it would in a real model, and so does a wrong
adapter at any position.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from common.drawing import drawn_on_device
from common.messages import Grammar, SamplingParams, TokenLogprob
from common.plan import Batch, BatchResult, Row, Sample

VOCAB = 97
PAGE = 4
_MODULUS = (1 << 61) - 1
GARBAGE = -1


def advance(state: int, token: int, adapter: str = "") -> int:
    """`adapter`: the digest of what the position is computed with; empty for the base model."""
    salt = zlib.crc32(adapter.encode()) * VOCAB if adapter else 0
    return (state * 1_000_003 + token + 1 + salt) % _MODULUS


def next_token(state: int) -> int:
    return (state * 2_654_435_761 % _MODULUS) % VOCAB


def reference(prompt: list[int], count: int, adapter: str = "") -> list[int]:
    """What an undisturbed greedy run answers."""
    state, output = 7, []
    for token in prompt:
        state = advance(state, token, adapter)
    for _ in range(count):
        output.append(next_token(state))
        state = advance(state, output[-1], adapter)
    return output


def score(state: int, token: int) -> float:
    """What a model in this state thinks of a prompt's next token."""
    return -float((state * 31 + token) % 9973)


def reference_scores(prompt: list[int], adapter: str = "") -> list[float]:
    """What an undisturbed run says of all prompt tokens but the first."""
    state, scores = 7, []
    for token, following in itertools.pairwise(prompt):
        state = advance(state, token, adapter)
        scores.append(score(state, following))
    return scores


class Violation(AssertionError):
    """Something happened that the design excludes."""


class Planted(Exception):
    """What a test wanted to go wrong."""


@dataclass
class Memory:
    """One node's pages: content of each position, or None."""

    num_pages: int
    cells: list[list[int | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = [[None] * PAGE for _ in range(self.num_pages)]

    def wipe(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.cells[page] = [None] * PAGE


@dataclass
class Told:
    """What a runner knows of a slot's owner."""

    tokens: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    """What the KV of each position must be."""
    table: list[int] = field(default_factory=list)
    drawn: int | None = None
    """The token drawn last."""


@dataclass(eq=False)
class FakeStep:
    """A step that was launched; its rows are computed when its result is wanted, or before."""

    runner: FakeRunner
    rows: tuple[Row, ...]
    fails: bool
    needs_the_host: bool
    outcome: BatchResult | None = None

    def result(self) -> BatchResult:
        self.runner.finish(self)
        if self.fails:
            raise Planted("an engine failure that is noticed late")
        assert self.outcome is not None
        return self.outcome


class FakeRunner:
    """Computes rows against `Memory` the way the real runner does against tensors.

    Attention reads the KV of all positions before a row. If any of them is not what the request's
    own tokens make it, whoever's fault that is, everything computed from there on is garbage.

    One that `overlaps` computes late: what happens to the memory between a launch and its result
    happens before the step. (Sometimes early: then it happens behind it.)
    """

    def __init__(
        self,
        memory: Memory,
        lora_slots: Mapping[int, str],
        grammars: Set[Grammar] = frozenset(),
        *,
        chance: random.Random | None = None,
    ) -> None:
        """`lora_slots`: slot -> digest of what is in it; without those that are being filled.
        `grammars`: those that are compiled. With `chance` it overlaps."""
        self.memory = memory
        self.lora_slots = lora_slots
        self.grammars = grammars
        self.told: dict[int, Told] = {}
        self.fail_next = False
        self.in_flight: list[FakeStep] = []
        """Launched, and nobody has asked for the result."""
        self.most_in_flight = 0
        self.guessed = 0
        """Rows whose token the host did not know."""
        self._chance = chance
        self._sampling: dict[int, SamplingParams] = {}
        self._lost: set[int] = set()
        """Slots of a step that failed: what else is launched for their owners is garbage."""

    @property
    def overlaps(self) -> bool:
        return self._chance is not None

    def launch(self, batch: Batch) -> FakeStep:
        fails_late = False
        if self.fail_next:
            self.fail_next = False
            fails_late = self._chance is not None and self._chance.random() < 0.5
            if not fails_late:
                raise Planted("an engine failure")
        if not batch.rows or len({row.slot for row in batch.rows}) != len(batch.rows):
            raise Violation("an empty batch, or one slot twice")
        self._check_may_launch()
        owners = {row.slot: row.init.sampling for row in batch.rows if row.init is not None}
        self._sampling.update(owners)
        step = FakeStep(self, batch.rows, fails_late, any(map(self._needs_the_host, batch.rows)))
        self.in_flight.append(step)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        self.guessed += sum(row.from_slot for row in batch.rows)
        if self._chance is None or self._chance.random() < 0.3:
            self._compute_upto(step)
        return step

    def finish(self, step: FakeStep) -> None:
        """Its result is wanted."""
        if step is not self.in_flight[0]:
            raise Violation("steps are taken in out of order")
        self._compute_upto(step)
        self.in_flight.remove(step)

    def pages_to_be_written(self) -> set[int]:
        """By steps that were launched and are not computed."""
        tables = {slot: list(told.table) for slot, told in self.told.items()}
        pages: set[int] = set()
        lost = set(self._lost)
        for step in self.in_flight:
            if step.fails:
                lost.update(row.slot for row in step.rows)
            elif step.outcome is None:
                for row in step.rows:
                    if row.init is not None:
                        lost.discard(row.slot)
                        tables[row.slot] = []
                    if row.slot not in lost:
                        tables[row.slot] += row.new_pages
                        end = row.start + len(row.token_ids)
                        pages.update(tables[row.slot][row.start // PAGE : -(-end // PAGE)])
        return pages

    def _check_may_launch(self) -> None:
        if self.in_flight and self._chance is None:
            raise Violation("launched before the step before was taken in")
        if len(self.in_flight) > 1:
            raise Violation("a third step is launched")
        if self.in_flight and self.in_flight[0].needs_the_host:
            raise Violation("launched behind a step that needs the host")

    def _needs_the_host(self, row: Row) -> bool:
        params, index = self._sampling[row.slot], row.sample_index
        if index is not None and index >= params.max_tokens:
            raise Violation(f"output {index} is drawn of {params.max_tokens}")
        return row.prompt_logprobs is not None or (
            index is not None and not drawn_on_device(params, index)
        )

    def _compute_upto(self, last: FakeStep) -> None:
        for step in self.in_flight[: self.in_flight.index(last) + 1]:
            if step.outcome is None and not step.fails:
                done = [self._row(row) for row in step.rows]
                step.outcome = BatchResult(tuple(s for s, _ in done), tuple(p for _, p in done))
            elif step.fails:
                self._lost.update(row.slot for row in step.rows)

    def _row(self, row: Row) -> tuple[Sample | None, tuple[TokenLogprob, ...]]:
        if row.init is not None:
            self._lost.discard(row.slot)
            known = [*row.init.prompt_ids, *row.init.output_ids]
            self.told[row.slot] = Told(tokens=known[: row.start])
            grammar = row.init.sampling.grammar
            if grammar is not None and grammar not in self.grammars:
                raise Violation("computed before its grammar was compiled")
        if row.slot in self._lost:
            return (None if row.sample_index is None else Sample(0)), ()
        told = self.told[row.slot]
        used = -(-row.start // PAGE)
        fresh = row.new_pages[max(0, used - len(told.table)) :]
        told.table += row.new_pages
        self.memory.wipe(fresh)
        if row.lora_slot is not None and row.lora_slot not in self.lora_slots:
            raise Violation(f"computed with slot {row.lora_slot}, which is empty or being filled")
        adapter = "" if row.lora_slot is None else self.lora_slots[row.lora_slot]
        state = self._attend(told, row.start, adapter)
        scores = []
        for offset, token in enumerate(self._token_ids(row, told)):
            state = advance(state, token, adapter)
            position = row.start + offset
            self.memory.cells[told.table[position // PAGE]][position % PAGE] = state
            if offset < len(row.next_ids):
                scores.append(TokenLogprob(score(state, row.next_ids[offset])))
        told.tokens += self._token_ids(row, told)
        if row.sample_index is None:
            return None, tuple(scores)
        told.drawn = next_token(state)
        return Sample(told.drawn), tuple(scores)

    def _token_ids(self, row: Row, told: Told) -> Sequence[int]:
        if not row.from_slot:
            return row.token_ids
        if self._chance is None or told.drawn is None or len(row.token_ids) != 1:
            raise Violation("a row is to go on from a token that was never drawn")
        return (told.drawn,)

    def _attend(self, told: Told, upto: int, adapter: str) -> int:
        """The state after all positions before `upto`; garbage unless all of them are right."""
        if len(told.tokens) != upto:
            raise Violation(f"a row starts at {upto}, the slot has computed {len(told.tokens)}")
        states = told.states
        for token in told.tokens[len(states) :]:
            states.append(advance(states[-1] if states else 7, token, adapter))
        for first in range(0, upto, PAGE):
            expected = states[first : first + PAGE]
            if self.memory.cells[told.table[first // PAGE]][: len(expected)] != expected:
                return GARBAGE
        return states[-1] if states else 7
