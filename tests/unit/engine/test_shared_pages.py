"""Pages of a prefix that several requests read: the texts are those of requests by themselves."""

from collections.abc import Callable

import pytest

from tests.unit.engine.conftest import Zoo
from tests.unit.engine.driving import Engine, Generation, greedy

Prompt = Callable[..., list[int]]


def behind(
    engine: Engine, slot: int, first: Generation, prompt: list[int], pages: int
) -> Generation:
    """A request that begins behind `pages` of the pages of another."""
    generation = engine.start(slot, prompt, greedy(12))
    generation.pages = first.pages[:pages]
    generation.computed = pages * engine.page_size
    return generation


@pytest.mark.parametrize("variant", ["llama", "qwen3", "qwen2-sliding"])
@pytest.mark.parametrize("shared", [1, 2, 7])
def test_requests_that_share_pages_answer_as_if_alone(
    zoo: Zoo, prompt: Prompt, variant: str, shared: int
) -> None:
    """One begins where the other still generates, and both go on beside each other."""
    engine = Engine(zoo.loaded(variant))
    one = prompt(33)
    others = [one[: 4 * shared] + prompt(9, seed) for seed in (1, 2)]
    want = [zoo.greedy(variant, tokens, 12) for tokens in (one, *others)]
    first = engine.start(0, one, greedy(12))
    engine.step((first, 33))
    second = behind(engine, 1, first, others[0], shared)
    third = behind(engine, 2, first, others[1], shared)
    engine.step((first, 1), (second, 9), (third, 4))
    engine.step((first, 1), (second, 1), (third, 5))
    for _ in range(11):
        running = [g for g in (first, second, third) if len(g.outputs) < 12]
        engine.step(*((generation, 1) for generation in running))
    assert [first.outputs, second.outputs, third.outputs] == want


def test_outputs_of_one_request_are_the_prompt_of_the_next(zoo: Zoo, prompt: Prompt) -> None:
    """The next turn of a conversation begins behind pages that were decoded token by token."""
    engine = Engine(zoo.loaded("llama"))
    first = engine.generate(prompt(10), greedy(12))
    following = [*first.prompt, *first.outputs, *prompt(5, 3)]
    second = behind(engine, 1, first, following, 5)  # 21 positions were computed
    engine.step((second, len(following) - 20))
    while len(second.outputs) < 12:
        engine.step((second, 1))
    assert second.outputs == zoo.greedy("llama", following, 12)
