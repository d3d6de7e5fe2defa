"""The real checker in its own process: hostile grammars are refused in time, and nothing dies."""

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.grammar.limits import CHECK_CPU_S, MAX_GRAMMAR_CHARACTERS
from common.messages import Grammar, GrammarKind
from router.errors import ApiError
from router.grammar_checks import GrammarChecks
from tests.tiny_models import VOCAB_SIZE

Scenario = Callable[[GrammarChecks], Awaitable[None]]
REGEX = Grammar(GrammarKind.REGEX, "[ab]+c")


def schema(content: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(content))


def children(*, but: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Processes below this one; `but` were there before."""
    return [child for child in psutil.Process().children(recursive=True) if child not in but]


def in_checks(folder: Path, scenario: Scenario, timeout_s: float = 20.0) -> None:
    before = children()  # of other tests: multiprocessing's tracker of resources stays

    async def run() -> None:
        checks = GrammarChecks(folder, VOCAB_SIZE, timeout_s)
        try:
            async with asyncio.timeout(60):
                await scenario(checks)
        finally:
            await checks.close()
        assert not children(but=before)

    asyncio.run(run())


async def problem(checks: GrammarChecks, grammar: Grammar) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await checks.checked(grammar, "the_field")
    return refused.value


HOSTILE = {
    "an intersection that explodes": Grammar(
        GrammarKind.EBNF,
        "start: T\nT: " + " & ".join(f"/(.*x){{{i}}}.*/" for i in range(50)),
    ),
    "a number that explodes": schema({"type": "integer", "multipleOf": 999983}),
    "alternatives that multiply": schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(2)]}
                for i in range(10)
            ]
        }
    ),
    "a long chain of references": schema(
        {
            "$ref": "#/$defs/a0",
            "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1800)}
            | {"a1800": {"type": "string"}},
        }
    ),
    "a long chain of rules": Grammar(
        GrammarKind.EBNF,
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4500)) + 'r4500: "x"',
    ),
    "deep nesting": Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000),
    "brackets in brackets": Grammar(GrammarKind.REGEX, "(" * 30000 + "a" + ")" * 30000),
    "nothing to say": Grammar(GrammarKind.EBNF, "root ::="),
    "a reference to elsewhere": schema({"$ref": "https://example.com/schema.json"}),
    "a reference to itself": schema({"$ref": "#"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_in_bounded_time(tiny_folder: Path, name: str) -> None:
    async def scenario(checks: GrammarChecks) -> None:
        await checks.checked(REGEX, "warm_up")
        began = time.monotonic()
        error = await problem(checks, HOSTILE[name])
        taken = time.monotonic() - began
        assert (error.status, error.param) == (400, "the_field")
        assert error.code == "invalid_grammar"
        assert len(error.message) < 400
        assert taken < 20 * CHECK_CPU_S, "bounded by processor time, on however busy a machine"
        assert await checks.checked(REGEX, "after") == REGEX
        assert checks.counts == {"accepted": 1, "refused": 1, "remembered": 1, "unanswered": 0}

    in_checks(tiny_folder, scenario)


def test_the_event_loop_runs_on_meanwhile(tiny_folder: Path) -> None:
    async def scenario(checks: GrammarChecks) -> None:
        await checks.checked(REGEX, "warm_up")
        asked = asyncio.create_task(problem(checks, HOSTILE["a number that explodes"]))
        turns = 0
        while not asked.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 100

    in_checks(tiny_folder, scenario)


def test_a_harmless_grammar_does_not_wait_for_a_hostile_one(tiny_folder: Path) -> None:
    async def scenario(checks: GrammarChecks) -> None:
        await checks.checked(REGEX, "warm_up")
        hostile = asyncio.create_task(problem(checks, HOSTILE["a number that explodes"]))
        await asyncio.sleep(0)
        await checks.checked(schema({"type": "integer"}), "harmless")
        assert not hostile.done()
        await hostile

    in_checks(tiny_folder, scenario)


def test_a_verdict_is_kept_and_shared(tiny_folder: Path) -> None:
    async def scenario(checks: GrammarChecks) -> None:
        both = await asyncio.gather(*(checks.checked(REGEX, "x") for _ in range(8)))
        assert set(both) == {REGEX}
        assert checks.num_trials == 1
        await checks.checked(REGEX, "x")
        assert checks.num_trials == 1

    in_checks(tiny_folder, scenario)


def test_a_client_that_leaves_ends_nobodys_trial(tiny_folder: Path) -> None:
    async def scenario(checks: GrammarChecks) -> None:
        first = asyncio.create_task(checks.checked(REGEX, "x"))
        second = asyncio.create_task(checks.checked(REGEX, "x"))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == REGEX
        assert checks.num_trials == 1

    in_checks(tiny_folder, scenario)


def test_a_checker_that_dies_is_replaced(tiny_folder: Path) -> None:
    before = children()

    async def scenario(checks: GrammarChecks) -> None:
        await checks.checked(REGEX, "x")
        (checker,) = children(but=before)
        asked = asyncio.create_task(problem(checks, HOSTILE["a number that explodes"]))
        while not checker.children():
            await asyncio.sleep(0.01)
        checker.kill()
        assert (await asked).status == 503
        grammar = schema({"type": "integer"})
        assert await checks.checked(grammar, "x") == grammar

    in_checks(tiny_folder, scenario)


def test_no_answer_in_time_is_503(tiny_folder: Path) -> None:
    async def scenario(checks: GrammarChecks) -> None:
        assert (await problem(checks, REGEX)).status == 503

    in_checks(tiny_folder, scenario, timeout_s=0.001)


def test_too_long_a_text_reaches_nobody(tiny_folder: Path) -> None:
    async def scenario(checks: GrammarChecks) -> None:
        text = "a" * (MAX_GRAMMAR_CHARACTERS + 1)
        error = await problem(checks, Grammar(GrammarKind.REGEX, text))
        assert (error.status, error.code) == (400, "grammar_too_large")
        assert checks.num_trials == 0

    in_checks(tiny_folder, scenario)


def test_a_model_without_an_end_has_no_grammars(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_folder / "tokenizer.json", tmp_path)

    async def scenario(checks: GrammarChecks) -> None:
        for _ in range(2):
            error = await problem(checks, REGEX)
            assert error.status == 400
            assert "no end-of-sequence token" in error.message

    in_checks(tmp_path, scenario)


def test_ebnf_comes_back_as_lark(tiny_folder: Path) -> None:
    async def scenario(checks: GrammarChecks) -> None:
        grammar = await checks.checked(Grammar(GrammarKind.EBNF, 'root ::= "a" | "b"'), "x")
        assert "::=" not in grammar.text
        assert await checks.checked(grammar, "x") == grammar

    in_checks(tiny_folder, scenario)
