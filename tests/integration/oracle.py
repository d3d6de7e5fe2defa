"""What transformers, and PEFT for adapters, answer greedily in float32: the truth that a cluster
must tell too."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from tests.adapters import PeftOracle
from tests.tiny_models import VOCAB_SIZE


class Oracle:
    """Greedy continuations of a model and its adapters, end-of-sequence ids ignored."""

    def __init__(self, folder: Path, adapters: Mapping[str, Path] | None = None) -> None:
        self._peft = PeftOracle(folder, adapters or {})
        self._answer = cache(self._generate)

    def answer(self, prompt: list[int], count: int, adapter: str | None = None) -> list[int]:
        """`count` token ids after `prompt`, of the base model if no adapter is named."""
        return self._answer(tuple(prompt), count, adapter)

    def _generate(self, prompt: tuple[int, ...], count: int, adapter: str | None) -> list[int]:
        with _one_thread():
            answer = self._peft.greedy(adapter, prompt, count)
        assert len(answer) == count
        return answer


@contextmanager
def _one_thread() -> Iterator[None]:
    """Models this small lose more than they win by a second thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def random_prompt(chance: random.Random, length: int) -> list[int]:
    """Token ids without the special ones."""
    return [chance.randrange(3, VOCAB_SIZE) for _ in range(length)]
