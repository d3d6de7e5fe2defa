"""Compiling beside the engine: one event for each command, kept results, an orderly end."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.grammar import store as store_module
from common.grammar.compiler import GrammarCompiler
from common.grammar.errors import GrammarError
from common.grammar.store import GrammarStore
from common.grammar.vocabulary import Vocabulary, load_vocabulary
from common.messages import Grammar, GrammarKind
from common.plan import CompileGrammar, GrammarCompiled, GrammarEvent, GrammarFailed
from tests.unit.grammar.drawing import regex

WAIT_S = 20.0


class Compiling:
    """A compiler at work; `events(n)` waits for so many."""

    def __init__(self, store: GrammarStore) -> None:
        self.store = store
        self.compiler = GrammarCompiler(store)
        self._woken = threading.Event()
        self.compiler.start(self._woken.set)

    def events(self, count: int) -> list[GrammarEvent]:
        found: list[GrammarEvent] = []
        while len(found) < count:
            assert self._woken.wait(WAIT_S), found
            self._woken.clear()
            found += self.compiler.poll()
        return found


@pytest.fixture
def compiling(vocabulary: Vocabulary) -> Iterator[Compiling]:
    made = Compiling(GrammarStore(lambda: vocabulary))
    yield made
    made.compiler.close()


def test_each_command_ends_with_one_event_in_order(compiling: Compiling) -> None:
    texts = ["a+", "(", "b+", "a+"]
    compiling.compiler.submit([CompileGrammar(n, regex(text)) for n, text in enumerate(texts)])
    events = compiling.events(4)
    assert [event.room for event in events] == [0, 1, 2, 3]
    kinds = [GrammarCompiled, GrammarFailed, GrammarCompiled, GrammarCompiled]
    assert [type(event) for event in events] == kinds


def test_what_is_known_does_not_wait_behind_what_is_not(compiling: Compiling) -> None:
    compiling.compiler.submit([CompileGrammar(1, regex("ab"))])
    compiling.events(1)
    slow = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"integer","multipleOf":9973}')
    compiling.compiler.submit([CompileGrammar(2, slow), CompileGrammar(3, regex("ab"))])
    assert compiling.compiler.poll() == [GrammarCompiled(3)], "at once"
    assert [event.room for event in compiling.events(1)] == [2]


def test_what_was_compiled_there_is_used_here(compiling: Compiling) -> None:
    compiling.compiler.submit([CompileGrammar(1, regex("ab"))])
    compiling.events(1)
    compiled = compiling.store.compiled(regex("ab"))
    assert compiling.store.compiled(regex("ab")) is compiled
    matcher = compiling.store.matcher(regex("ab"), ())
    assert matcher.allowed().any()


def test_matchers_of_one_grammar_do_not_touch_each_other(vocabulary: Vocabulary) -> None:
    store = GrammarStore(lambda: vocabulary)
    one, other = store.matcher(regex("ab?"), ()), store.matcher(regex("ab?"), ())
    one.consume(int(one.allowed().nonzero()[0][0]))
    assert one.allowed()[2]
    assert not other.allowed()[2]


def test_a_model_that_can_use_none_says_so_each_time(tmp_path: Path) -> None:
    loads: list[int] = []

    def load() -> Vocabulary:
        loads.append(1)
        return load_vocabulary(tmp_path, 10)

    compiling = Compiling(GrammarStore(load))
    compiling.compiler.submit([CompileGrammar(n, regex("a")) for n in range(2)])
    for event in compiling.events(2):
        assert isinstance(event, GrammarFailed)
        assert "tokenizer.json" in event.error
    compiling.compiler.close()
    assert len(loads) == 1


def test_the_least_recently_used_is_dropped(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_COMPILED", 2)
    store = GrammarStore(lambda: vocabulary)
    first, second = store.compiled(regex("a")), store.compiled(regex("b"))
    assert store.compiled(regex("a")) is first
    store.compiled(regex("c"))
    assert store.compiled(regex("a")) is first
    assert store.compiled(regex("b")) is not second


def test_closing_ends_the_thread_and_can_be_repeated(vocabulary: Vocabulary) -> None:
    compiling = Compiling(GrammarStore(lambda: vocabulary))
    for _ in range(2):
        compiling.compiler.close()
    assert not any(thread.name == "grammars" for thread in threading.enumerate())


def test_an_output_that_does_not_obey_is_an_error(vocabulary: Vocabulary) -> None:
    grammar: Grammar = regex("a")
    with pytest.raises(GrammarError):
        GrammarStore(lambda: vocabulary).matcher(grammar, (250, 251))
