"""What transformers, and peft for adapters, answer greedily in float32: the truth that a cluster
must tell too."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.tiny_models import VOCAB_SIZE


class Oracle:
    """Greedy continuations by transformers, end-of-sequence ids ignored."""

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        """`adapter`: a folder in PEFT's format that the model at `folder` wears."""
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if adapter is not None:
            self._model = PeftModel.from_pretrained(self._model, adapter)
        self._model.train(False)
        self._answer = cache(self._generate)

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """`count` token ids after `prompt`."""
        return self._answer(tuple(prompt), count)

    def _generate(self, prompt: tuple[int, ...], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        with _one_thread():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
        answer: list[int] = output[0, len(prompt) :].tolist()
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
