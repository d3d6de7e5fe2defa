"""Requests whose grammar a node has yet to compile, cannot compile, or cannot follow any more."""

from typing import Any

import pytest

from common.grammar.desk import GrammarDesk
from common.lifecycle import State
from common.messages import (
    Abort,
    Failed,
    FailureKind,
    Generate,
    Grammar,
    GrammarKind,
    PeerWelcome,
    Retracted,
    RoomFailed,
    SamplingParams,
)
from common.modes import PauseMode
from common.plan import (
    BatchResult,
    CompileGrammar,
    GrammarCompiled,
    GrammarFailed,
    NotSampled,
    Sample,
)
from tests.unit.scheduler.harness import (
    Driven,
    decode,
    destination,
    generate,
    landed,
    prefill,
    running,
)
from tests.unit.scheduler.model import Violation
from tests.unit.scheduler.node_settings import FINGERPRINT
from tests.unit.scheduler.real_router import RealRouter
from tests.unit.scheduler.test_fuzz import run

GRAMMAR = Grammar(GrammarKind.REGEX, "a+")


def constrained(room: int, **fields: Any) -> Generate:
    sampling = SamplingParams(max_tokens=8, seed=1, grammar=GRAMMAR)
    return generate(room, sampling=sampling, **fields)


def step_failing(driven: Driven, error: str) -> None:
    """One turn in which nothing can be drawn for requests with a grammar."""
    plan = driven.scheduler.schedule(driven.now)
    assert plan.batch is not None
    samples = [
        Sample(5) if req.sampling.grammar is None else NotSampled(error)
        for req, _ in driven.scheduler._flight.newest
    ]
    driven.scheduler.process_batch_result(BatchResult(tuple(samples)), driven.now)
    driven.scheduler.check_invariants()


def compiled(driven: Driven, room: int) -> None:
    driven.scheduler.on_grammar(GrammarCompiled(room), driven.now)


def test_prefill_passes_over_who_waits_for_a_grammar() -> None:
    node = prefill()
    node.router(constrained(1))
    node.router(generate(2))
    node.peer(destination(1), "d")
    node.peer(destination(2, first=2), "d")
    plan = node.step()
    assert plan.grammars == (CompileGrammar(1, GRAMMAR),)
    assert plan.batch is not None
    assert len(plan.batch.rows) == 1
    assert [req.room for req in node.scheduler.queues[State.WAITING]] == [1]
    plan = node.step()
    assert plan.grammars == (), "asked for once"
    assert plan.batch is None
    compiled(node, 1)
    assert node.step().batch is not None


def test_decode_names_no_pages_before_it_has_the_grammar() -> None:
    node = decode()
    node.router(constrained(1))
    node.router(generate(2))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    node.step()
    assert [req.room for req in node.scheduler.queues[State.PREALLOC]] == [1]
    assert [req.room for req in node.scheduler.queues[State.TRANSFER]] == [2]
    compiled(node, 1)
    node.step()
    assert {req.room for req in node.scheduler.queues[State.TRANSFER]} == {1, 2}


@pytest.mark.parametrize("make", [prefill, decode])
def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(make: Any) -> None:
    node: Driven = make()
    node.router(constrained(1))
    node.router(constrained(2))
    node.step()
    node.scheduler.on_grammar(GrammarFailed(1, "no such thing"), node.now)
    compiled(node, 2)
    node.step()
    (failed,) = node.said(Failed)
    assert (failed.room, failed.kind, failed.message) == (1, FailureKind.INVALID, "no such thing")
    assert [req.room for req in node.scheduler.unfinished()] == [2]


@pytest.mark.parametrize("make", [prefill, decode])
def test_an_answer_may_come_after_its_request_has_ended(make: Any) -> None:
    node: Driven = make()
    node.router(constrained(1))
    node.router(constrained(2))
    node.step()
    node.router(Abort(1))
    node.router(Abort(2))
    node.scheduler.on_grammar(GrammarFailed(1, "x"), node.now)
    compiled(node, 2)
    node.step()
    assert not node.said(Failed)
    assert node.scheduler.is_empty


@pytest.mark.parametrize("mode", list(PauseMode))
def test_a_pause_while_a_grammar_is_compiled(mode: PauseMode) -> None:
    node = prefill()
    node.router(constrained(1))
    node.peer(destination(1), "d")
    node.step()
    node.scheduler.pause_generation(mode)
    compiled(node, 1)
    assert node.step().batch is None
    node.scheduler.continue_generation()
    assert (node.step().batch is None) is (mode is PauseMode.ABORT)


def test_a_drain_hands_over_who_waits_for_a_grammar() -> None:
    node = prefill()
    node.router(constrained(1))
    node.step()
    node.scheduler.leave.begin(node.now)
    node.step()
    assert [retracted.room for retracted in node.said(Retracted)] == [1]
    compiled(node, 1)
    node.step()
    assert node.scheduler.is_empty


def test_a_row_that_cannot_be_drawn_fails_its_request_alone_on_prefill() -> None:
    node = prefill()
    node.router(constrained(1))
    node.router(generate(2))
    compiled(node, 1)
    node.peer(destination(1), "d")
    node.peer(destination(2, first=2), "d")
    step_failing(node, "limits used up")
    node.step()
    assert node.failures(FailureKind.INVALID) == [1]
    assert [said.room for said in node.said(RoomFailed)] == [1], "decode hears it too"
    assert [req.room for req in node.scheduler.queues[State.INFLIGHT]] == [2]


def test_a_row_that_cannot_be_drawn_fails_its_request_alone_on_decode() -> None:
    node = decode()
    running(node, 2)
    node.router(constrained(1))
    compiled(node, 1)
    node.step()
    node.fact(landed(1))
    step_failing(node, "limits used up")
    node.step()
    assert node.failures(FailureKind.INVALID) == [1]
    assert [req.room for req in node.scheduler.running_batch] == [2]
    assert node.scheduler.kv.num_free < node.scheduler.kv.num_pages
    node.router(Abort(2))
    node.step()
    assert node.scheduler.kv.num_free == node.scheduler.kv.num_pages


def test_decode_alone_computes_no_prompt_before_it_has_the_grammar() -> None:
    node = decode()
    node.router(constrained(1, prefill_incarnation="", prefill_address=""))
    assert node.step().batch is None
    assert [req.room for req in node.scheduler.queues[State.PREALLOC]] == [1]
    compiled(node, 1)
    plan = node.step()
    assert plan.batch is not None
    assert [row.start for row in plan.batch.rows] == [0]


def test_the_fuzz_notices_who_does_not_wait_for_its_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fuzz() -> None:
        for seed in range(20):
            run(seed, router=RealRouter)

    monkeypatch.setattr(GrammarDesk, "ready", lambda _desk, _req: True)
    with pytest.raises(Violation, match="before its grammar was compiled"):
        fuzz()
