"""A request's outputs become batches of text: one for each turn, whatever happens to its sink."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.messages import SamplingParams, StopReason
from router.arrivals import Arrival
from router.errors import ApiError, unavailable
from router.generation import Generation
from router.prepared import ChoiceSpec, Prepared
from router.protocol.terms import DEFAULT_TERMS
from router.requests import JobAborted, JobFailed, Listener, NewTokens
from router.service import RouterService
from router.text_stream import Delta, TextOptions
from router.tokens import TextCodec
from router.turn import TurnEnd


class Service:
    """What a generation asks of the router's centre."""

    def __init__(self) -> None:
        self.turn = TurnEnd()
        self.cancelled: list[Any] = []
        self.ears: list[Listener] = []

    def submit(self, _arrival: Any, _terms: Any, choices: Any, listeners: Any) -> list[Any]:
        self.ears += listeners
        return [SimpleNamespace(cached_tokens=0, choice=i) for i in range(len(choices))]

    def cancel(self, jobs: Sequence[Any], outcome: str = "") -> None:
        self.cancelled += [(job.choice, outcome) for job in jobs]


class Sink:
    def __init__(self, *, eager: bool = True, broken: bool = False) -> None:
        self.eager = eager
        self.broken = broken
        self.batches: list[list[tuple[int, str]]] = []
        self.ends = 0

    def take(self, batch: Sequence[Delta]) -> None:
        if self.broken:
            raise ZeroDivisionError
        self.batches.append([(delta.choice, delta.text) for delta in batch])

    def end(self) -> None:
        self.ends += 1


def begin(
    service: Service, codec: TextCodec, n: int = 1, stops: tuple[str, ...] = ()
) -> Generation:
    spec = ChoiceSpec([5], SamplingParams(max_tokens=9, seed=1), TextOptions(stops=stops))
    prepared = Prepared((spec,) * n, 1)
    generation = Generation(
        cast(RouterService, service), codec, Arrival(0.0), prepared, DEFAULT_TERMS
    )
    return generation.__enter__()


def tokens(codec: TextCodec, text: str, finish: StopReason | None = None) -> NewTokens:
    return NewTokens(tuple(codec.encode_now(text)), None, finish)


def test_what_a_turn_brings_for_all_choices_is_one_batch(codec: TextCodec) -> None:
    service, sink = Service(), Sink()
    generation = begin(service, codec, n=2)
    service.ears[0].deliver(tokens(codec, "a"))
    service.turn.run()
    assert sink.batches == []
    generation.pipe(sink)  # what came before is not lost
    for text in "bc":
        for ear in service.ears:
            ear.deliver(tokens(codec, text))
    assert sink.batches == [[(0, "a")]]
    service.turn.run()
    assert sink.batches[1:] == [[(0, "b"), (1, "b"), (0, "c"), (1, "c")]]
    service.ears[0].deliver(tokens(codec, "d", StopReason.LENGTH))
    service.ears[1].deliver(JobAborted("why"))
    assert (sink.ends, generation.is_over()) == (0, False)
    service.turn.run()
    assert (sink.ends, generation.is_over()) == (1, True)


def test_who_wants_the_whole_is_left_alone_until_the_end(codec: TextCodec) -> None:
    service, sink = Service(), Sink(eager=False)
    begin(service, codec).pipe(sink)
    for text in "abc":
        service.ears[0].deliver(tokens(codec, text))
        service.turn.run()
    assert sink.batches == []
    service.ears[0].deliver(tokens(codec, "d", StopReason.LENGTH))
    service.turn.run()
    assert sink.batches == [[(0, "a"), (0, "b"), (0, "c"), (0, "d")]]


def test_a_stop_string_is_noticed_at_once_also_for_who_wants_the_whole(codec: TextCodec) -> None:
    service, sink = Service(), Sink(eager=False)
    begin(service, codec, stops=("X",)).pipe(sink)
    for text in ("a", "bX", "c"):
        service.ears[0].deliver(tokens(codec, text))
        service.turn.run()
    assert service.cancelled == [(0, "stop")]
    assert (sink.batches, sink.ends) == ([[(0, "a")], [(0, "b")]], 1)


def test_a_request_that_cannot_be_written_fails_alone(codec: TextCodec) -> None:
    service, broken, sound = Service(), Sink(broken=True), Sink()
    failing, other = begin(service, codec), begin(service, codec)
    failing.pipe(broken)
    other.pipe(sound)
    for ear in service.ears:
        ear.deliver(tokens(codec, "a"))
    service.turn.run()
    assert sound.batches == [[(0, "a")]]
    assert (broken.ends, sound.ends) == (1, 0)
    with pytest.raises(ApiError) as caught:
        failing.check()
    assert caught.value.status == 500


def test_what_came_before_a_failure_is_handed_on(codec: TextCodec) -> None:
    service, sink = Service(), Sink()
    generation = begin(service, codec)
    generation.pipe(sink)
    service.ears[0].deliver(tokens(codec, "a"))
    service.ears[0].deliver(JobFailed(unavailable("gone")))
    service.turn.run()
    assert (sink.batches, sink.ends) == ([[(0, "a")]], 1)
    with pytest.raises(ApiError) as caught:
        generation.check()
    assert caught.value.status == 503
