"""Two made-up loads: conversations whose turns contain real answers, and one system prompt for all.

The trace's prompts do not contain what was answered here. In a conversation the next prompt is the
one before, its answer, and something new: the answer's KV is on the decode node only.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.infinite_cache import InfiniteCache
from benchmarks.mooncake import Request
from benchmarks.replay import Answer, Player

CONVERSATIONS = 24
TURNS = 6
SYSTEM_TOKENS = 200
NEW_TOKENS = (10, 120)
"""Of a user's turn."""
ANSWER_TOKENS = (10, 60)
THINKING_S = (0.2, 2.0)
"""Between an answer and the next turn."""
STRANGERS = 200
"""Requests that share nothing but the system prompt."""
SYSTEM_PROMPT_TOKENS = 320


@dataclass(frozen=True, slots=True)
class Talk:
    """All turns, and what infinite caches could have saved of them."""

    answers: list[Answer]
    prompts_bound: int
    """Prompt tokens that need not be computed if all prompts are remembered."""
    bound: int
    """The same if answers are remembered, too."""


class _Bounds:
    """Kept as the turns come: whose answer was there before which question."""

    def __init__(self, page_size: int) -> None:
        self._prompts, self._all = InfiniteCache(page_size), InfiniteCache(page_size)
        self.prompts = self.all = 0

    def asked(self, prompt: Sequence[int]) -> None:
        self.prompts += self._prompts.hit(prompt)
        self.all += self._all.hit(prompt)
        self._prompts.add(prompt)
        self._all.add(prompt)

    def answered(self, answer: Answer) -> None:
        """The KV of the last token sampled was never computed."""
        self._all.add([*answer.prompt, *answer.output[:-1]])


async def talk(player: Player, seed: int, tokens: range, page_size: int) -> Talk:
    """All conversations at once."""
    system = random.Random(seed).choices(tokens, k=SYSTEM_TOKENS)
    bounds = _Bounds(page_size)
    answers: list[Answer] = []

    async def converse(chance: random.Random) -> None:
        prompt = list(system)
        for _ in range(TURNS):
            await asyncio.sleep(chance.uniform(*THINKING_S))
            prompt += chance.choices(tokens, k=chance.randint(*NEW_TOKENS))
            bounds.asked(prompt)
            answer = await player.ask(list(prompt), chance.randint(*ANSWER_TOKENS))
            bounds.answered(answer)
            answers.append(answer)
            prompt += answer.output

    chances = (random.Random(f"{seed} {number}") for number in range(CONVERSATIONS))
    await asyncio.gather(*map(converse, chances))
    return Talk(answers, bounds.prompts, bounds.all)


def one_system_prompt(seed: int, tokens: range) -> list[Request]:
    """Requests that all begin alike and go on differently."""
    chance = random.Random(seed)
    system = chance.choices(tokens, k=SYSTEM_PROMPT_TOKENS)
    return [
        Request(0.0, system + chance.choices(tokens, k=chance.randint(16, 64)), 8)
        for _ in range(STRANGERS)
    ]
