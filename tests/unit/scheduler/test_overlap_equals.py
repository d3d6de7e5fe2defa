"""One decode node by itself, with and without steps in flight: the same texts, ends and pages.

What is compared: each request's tokens, each once and in order; its one end; that all pages and
slots come home; and, where nothing disturbed the two, what their prefix caches hold.
"""

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import Aborted, Retracted, SamplingParams, StopReason, Tokens
from common.modes import PauseMode
from common.plan import ToRouterMsg
from decode_node.scheduler import DecodeScheduler
from tests.unit.scheduler.harness import generate
from tests.unit.scheduler.model import PAGE, VOCAB, FakeRunner, Memory, reference
from tests.unit.scheduler.node_settings import settings as node_settings
from tests.unit.scheduler.test_planted import NOTICED
from tests.unit.scheduler.virtual_node import WatchedSteps

LAST_TURN = 40
PLENTY, SCARCE = 200, 14


@dataclass(frozen=True)
class Request:
    arrives: int
    prompt: list[int]
    max_tokens: int
    stop: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    """If there is one, the host draws."""
    aborted: int | None = None
    """The turn in which its router gives it up."""


@dataclass(frozen=True)
class Script:
    requests: tuple[Request, ...]
    pauses: tuple[tuple[int, PauseMode, int], ...] = ()
    """Turn, mode, and for how many turns."""
    pages: int = PLENTY

    @property
    def is_calm(self) -> bool:
        aborted = any(request.aborted is not None for request in self.requests)
        return not (aborted or self.pauses) and self.pages == PLENTY


@dataclass
class Story:
    """What one node said, request by request."""

    texts: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    retractions: int = 0
    cached: set[bytes] = field(default_factory=set)
    guessed: int = 0


class Alone:
    """Plays a script; what is retracted comes back in the next turn, as from a router."""

    def __init__(self, script: Script, *, overlap: bool) -> None:
        self.script = script
        self.scheduler = DecodeScheduler(
            node_settings("d", script.pages, max_running_requests=4), 0, local_chunk_size=3
        )
        chance = random.Random(3) if overlap else None
        self.runner = FakeRunner(Memory(script.pages), {}, chance=chance)
        self.steps = WatchedSteps(self.scheduler, self.runner, lambda: 0.0)
        self.story = Story()
        self.attempts = [0] * len(script.requests)
        self.returning: list[int] = []
        self.given_up: set[int] = set()
        """What their router hears of these it drops: it was on its way."""

    def play(self) -> Story:
        at_rest = 0
        for turn in range(1000):
            self.turn(turn)
            resting = turn > LAST_TURN and self.scheduler.is_empty and not self.returning
            at_rest = at_rest + 1 if resting else 0
            if at_rest > 1:  # the first such turn may have left something to be said
                break
        assert self.scheduler.is_empty, "it never came to rest"
        assert self.scheduler.kv.num_free == self.script.pages
        assert self.steps.errors == []
        self.story.cached = set(self.scheduler.kv._cache._entries)
        self.story.guessed = self.runner.guessed
        return self.story

    def turn(self, turn: int) -> None:
        self.control(turn)
        returning, self.returning = self.returning, []
        for number, request in enumerate(self.script.requests):
            if request.arrives == turn or number in returning:
                self.submit(number, request)
            if request.aborted == turn and number not in self.story.ends:
                self.story.ends[number] = "aborted"
                self.given_up.add(number)
                self.scheduler.abort_room(self.room(number))
        plan = self.scheduler.schedule(0.0)
        for message in plan.messages:
            if isinstance(message, ToRouterMsg):
                self.hear(message.body)
        self.steps.launch(plan.batch)
        self.steps.take_in()
        self.scheduler.check_invariants()

    def control(self, turn: int) -> None:
        for begins, mode, turns in self.script.pauses:
            if begins == turn:
                self.steps.land()
                self.scheduler.pause_generation(mode)
            elif begins + turns == turn:
                self.steps.land()
                self.scheduler.continue_generation()

    def room(self, number: int) -> int:
        return 1 + 1000 * number + self.attempts[number]

    def submit(self, number: int, request: Request) -> None:
        if number in self.story.ends:
            return
        self.attempts[number] += 1
        sampling = SamplingParams(
            max_tokens=request.max_tokens,
            seed=1,
            stop_token_ids=request.stop,
            presence_penalty=request.presence_penalty,
        )
        again = generate(
            self.room(number),
            prompt_ids=request.prompt,
            output_ids=list(self.story.texts.get(number, [])),
            sampling=sampling,
            attempt=self.attempts[number],
            rid=f"rid-{number}",
            prefill_incarnation="",
            prefill_address="",
        )
        self.scheduler.add_request(again, "r")

    def hear(self, body: object) -> None:
        if isinstance(body, Tokens):
            for output in body.outputs:
                number = output.room // 1000
                if number in self.given_up:
                    continue
                assert number not in self.story.ends, "a token behind the end"
                text = self.story.texts.setdefault(number, [])
                assert output.index == len(text), "a token twice, or out of order"
                text += output.token_ids
                if output.finish is not None:
                    self.story.ends[number] = output.finish.value
            return
        assert isinstance(body, Retracted | Aborted), body
        number = body.room // 1000
        if number in self.given_up:
            return
        assert number not in self.story.ends, "ended twice"
        if isinstance(body, Retracted):
            self.story.retractions += 1
            self.returning.append(number)
        else:
            self.story.ends[number] = "aborted"


def compare(script: Script) -> tuple[Story, Story]:
    plain, ahead = (Alone(script, overlap=overlap).play() for overlap in (False, True))
    assert plain.ends.keys() == ahead.ends.keys()
    for number, request in enumerate(script.requests):
        texts = [story.texts.get(number, []) for story in (plain, ahead)]
        undisturbed = reference(request.prompt, request.max_tokens)
        for text in texts:
            assert text == undisturbed[: len(text)]
        if "aborted" not in (plain.ends[number], ahead.ends[number]):
            assert texts[0] == texts[1]
            assert plain.ends[number] == ahead.ends[number]
    if script.is_calm:
        assert plain.ends == ahead.ends
        assert plain.cached == ahead.cached
        assert plain.retractions == ahead.retractions == 0
    return plain, ahead


TOKEN = st.integers(0, VOCAB - 1)
REQUEST = st.builds(
    Request,
    arrives=st.integers(0, LAST_TURN // 2),
    prompt=st.lists(TOKEN, min_size=1, max_size=14),
    max_tokens=st.integers(1, 12),
    stop=st.lists(TOKEN, max_size=40).map(tuple),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.0, 0.1]),
    aborted=st.none() | st.integers(1, LAST_TURN),
)
CALM = REQUEST.map(lambda request: replace(request, aborted=None))
PAUSE = st.tuples(st.integers(1, LAST_TURN), st.sampled_from(PauseMode), st.integers(1, 5))


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(CALM, min_size=1, max_size=6))
def test_undisturbed_everything_is_the_same(requests: list[Request]) -> None:
    compare(Script(tuple(requests)))


@settings(max_examples=120, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=8),
    pauses=st.lists(PAUSE, max_size=2),
    pages=st.sampled_from([PLENTY, SCARCE]),
)
def test_disturbed_each_text_is_the_same(
    requests: list[Request], pauses: list[tuple[int, PauseMode, int]], pages: int
) -> None:
    compare(Script(tuple(requests), tuple(pauses), pages))


def crowded() -> Script:
    """More than fits, with stop tokens that come now and then."""
    chance = random.Random(1)
    prompts = [[chance.randrange(VOCAB) for _ in range(5)] for _ in range(8)]
    stops = [tuple(reference(prompt, 9)[chance.choice([3, 8]) :][:1]) for prompt in prompts]
    wanted = enumerate(zip(prompts, stops, strict=True))
    requests = tuple(Request(number, prompt, 20, stop) for number, (prompt, stop) in wanted)
    return Script(requests, pages=SCARCE)


def test_the_comparison_reaches_what_it_is_for() -> None:
    plain, ahead = compare(crowded())
    assert ahead.guessed > 20
    assert plain.guessed == 0
    assert StopReason.STOP.value in ahead.ends.values()
    assert sum(5 + len(text) for text in ahead.texts.values()) > SCARCE * PAGE


def test_a_planted_fault_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.scheduler.is_over", lambda req: False)
    with pytest.raises(NOTICED):
        compare(crowded())
