"""Prompt logprobs through real processes equal transformers' log_softmax, caches on."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.cluster_fixture import cluster
from tests.integration.client import Client, client
from tests.integration.oracle import random_prompt
from tests.tiny_models import make_tiny_model

PAGE, CHUNK = 16, 48
TOLERANCE = 1e-4


class Truth:
    """Log probabilities as transformers computes them."""

    def __init__(self, folder: Path) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)

    def after(self, ids: list[int]) -> Tensor:
        """[tokens, vocab_size]: of what follows each token."""
        tokens = torch.tensor([ids])
        with torch.inference_mode():
            answer = self._model(tokens, attention_mask=torch.ones_like(tokens))
        logprobs: Tensor = answer.logits[0].float().log_softmax(dim=-1)
        return logprobs

    def check(self, ids: list[int], told: list[float | None]) -> None:
        """`told` is what an API says of each token of `ids`."""
        assert told[0] is None
        table = self.after(ids)
        want = [float(table[place, token]) for place, token in enumerate(ids[1:])]
        assert told[1:] == pytest.approx(want, abs=TOLERANCE)


async def ask(c: Client, path: str, body: dict[str, Any]) -> Any:
    status, answer = await c.post(path, body)
    assert status == 200, answer
    return answer


async def vllm_form(c: Client, truth: Truth, prompt: list[int]) -> None:
    """Two choices, each with all of it, ranks and alternatives included."""
    body = {"prompt": prompt, "max_tokens": 5, "n": 2, "prompt_logprobs": 3, "temperature": 1.0}
    answer = await ask(c, "/v1/completions", body)
    table = truth.after(prompt)
    for choice in answer["choices"]:
        places = choice["prompt_logprobs"]
        assert len(places) == len(prompt)
        truth.check(
            prompt,
            [
                None if place is None else place[str(token)]["logprob"]
                for token, place in zip(prompt, places, strict=True)
            ],
        )
        for position, place in enumerate(places[1:]):
            token = str(prompt[position + 1])
            rank = int((table[position] > table[position, int(token)]).sum()) + 1
            assert place[token]["rank"] == rank
            best = table[position].topk(3)
            assert {str(i) for i in best.indices.tolist()} | {token} == set(place)


async def openai_form(c: Client, truth: Truth, prompt: list[int]) -> None:
    """An echo covers prompt and output; with nothing to generate it covers the prompt alone."""
    body: dict[str, Any] = {"prompt": prompt, "logprobs": 1, "echo": True, "temperature": 0}
    scored = await ask(c, "/v1/completions", {**body, "max_tokens": 0})
    truth.check(prompt, scored["choices"][0]["logprobs"]["token_logprobs"])
    assert scored["usage"]["completion_tokens"] == 0
    native = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
    ids = (await ask(c, "/generate", native))["output_ids"]
    echoed = await ask(c, "/v1/completions", {**body, "max_tokens": 6})
    truth.check([*prompt, *ids], echoed["choices"][0]["logprobs"]["token_logprobs"])


async def sglang_form(c: Client, truth: Truth, prompt: list[int]) -> None:
    body = {
        "input_ids": prompt, "sampling_params": {"max_new_tokens": 2}, "return_logprob": True,
        "logprob_start_len": len(prompt) // 2,
    }  # fmt: skip
    told = (await ask(c, "/generate", body))["meta_info"]["input_token_logprobs"]
    start = len(prompt) // 2
    table = truth.after(prompt)
    assert [entry[1] for entry in told] == prompt[start:]
    want = [float(table[i, prompt[i + 1]]) for i in range(start, len(prompt) - 1)]
    assert [entry[0] for entry in told] == [None, *map(_about, want)]


def _about(value: float) -> Any:
    return pytest.approx(value, abs=TOLERANCE)


@pytest.mark.parametrize("prefill", [1, 0], ids=["pair", "decode_alone"])
def test_every_form_over_pages_chunks_and_shared_prefixes(tmp_path: Path, prefill: int) -> None:
    folder = make_tiny_model("llama", tmp_path / "llama")
    truth = Truth(folder)
    chance = random.Random(5)
    shared = random_prompt(chance, 3 * PAGE + 5)
    prompts = [random_prompt(chance, length) for length in (1, 2, PAGE, PAGE + 1)]
    prompts += [shared, *(shared + random_prompt(chance, more) for more in (1, PAGE, 2 * CHUNK))]

    async def scenario(url: str) -> None:
        async with client(url) as c:
            for prompt in prompts:  # both nodes' caches know all of it before it is asked about
                await c.tokens(prompt, 3)
            forms = (vllm_form, openai_form, sglang_form)
            await asyncio.gather(*(form(c, truth, prompt) for form in forms for prompt in prompts))

    router_args = "" if prefill else "--decode-alone"
    sizes: dict[str, Any] = {"page_size": PAGE, "chunk_size": CHUNK, "num_pages": 200}
    with cluster(folder, prefill, router_args=router_args, **sizes) as made:
        asyncio.run(scenario(made.url))
