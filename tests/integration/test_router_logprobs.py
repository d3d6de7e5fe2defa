"""Logprobs of prompts and `best_of` through a whole router, with stand-in nodes."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.messages import Generate
from tests.integration.router_rig import IDS, Cluster, in_cluster
from tests.standin import expected_prompt_logprobs


def chunks_of(lines: list[str]) -> list[dict[str, Any]]:
    """The JSON objects of a stream."""
    data = [line[6:] for line in lines if line]
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


def test_prompt_logprobs_as_vllm_tells_them(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body: dict[str, Any] = {"prompt": [IDS, IDS[:1]], "max_tokens": 3, "prompt_logprobs": 2}
        status, answer = await c.post("/v1/completions", body)
        assert status == 200
        long, short = answer["choices"]
        want = expected_prompt_logprobs(IDS, 2)
        assert len(long["prompt_logprobs"]) == len(IDS)
        assert long["prompt_logprobs"][0] is None
        for token, score, told in zip(IDS[1:], want, long["prompt_logprobs"][1:], strict=True):
            assert told[str(token)]["logprob"] == pytest.approx(score.logprob)
            assert set(told) == {str(token), str(token + 1)}
        assert short["prompt_logprobs"] == [None]
        assert long["logprobs"] is None
        assert long["text"] == c.text(3)

        messages = [{"role": "user", "content": "hi"}]
        body = {"messages": messages, "max_tokens": 3, "n": 2, "prompt_logprobs": 0}
        status, answer = await c.post("/v1/chat/completions", body)
        assert status == 200
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        assert "prompt_logprobs" not in answer["choices"][0]
        assert answer["choices"][1]["message"]["content"]

    in_cluster(model_folder, scenario)


def test_an_echo_has_one_list_of_prompt_and_output(model_folder: Path) -> None:
    """And streamed the same, in pieces."""

    async def scenario(c: Cluster) -> None:
        body: dict[str, Any] = {"prompt": "the one", "max_tokens": 4, "logprobs": 1, "echo": True}
        _, answer = await c.post("/v1/completions", body)
        (choice,) = answer["choices"]
        ids = c.codec.encode_now("the one")
        told = choice["logprobs"]
        assert choice["text"] == "the one" + c.text(4, ids)
        assert {len(values) for values in told.values()} == {len(ids) + 4}
        scores = [score.logprob for score in expected_prompt_logprobs(ids, 1)]
        assert told["token_logprobs"] == [None, *map(pytest.approx, scores), *[-0.5] * 4]
        assert "".join(told["tokens"]) == choice["text"]
        for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
            assert choice["text"][offset : offset + len(token)] == token
        assert "prompt_logprobs" not in choice

        streamed: dict[str, list[Any]] = {name: [] for name in told}
        text = ""
        for chunk in chunks_of(await c.lines("/v1/completions", {**body, "stream": True})):
            (part,) = chunk["choices"]
            text += part["text"]
            for name in streamed:
                streamed[name] += part["logprobs"][name]
        assert (text, streamed) == (choice["text"], told)

    in_cluster(model_folder, scenario)


def test_a_prompt_is_scored_and_nothing_is_generated(model_folder: Path) -> None:
    """What evaluation harnesses send: the prompt's own logprobs, no output."""

    async def scenario(c: Cluster) -> None:
        body: dict[str, Any] = {
            "prompt": [IDS, IDS[:4]], "max_tokens": 0, "logprobs": 1, "echo": True,
            "temperature": 0, "seed": 1234,
        }  # fmt: skip
        status, answer = await c.post("/v1/completions", body)
        assert status == 200
        for choice, ids in zip(answer["choices"], (IDS, IDS[:4]), strict=True):
            assert choice["text"] == c.codec.decode(ids)
            assert choice["finish_reason"] == "length"
            assert len(choice["logprobs"]["tokens"]) == len(ids)
            assert choice["logprobs"]["token_logprobs"][0] is None
        assert answer["usage"]["completion_tokens"] == 0
        (chunk,) = chunks_of(
            await c.lines("/v1/completions", {**body, "prompt": IDS, "stream": True})
        )
        assert chunk["choices"][0]["text"] == c.codec.decode(IDS)
        assert len(chunk["choices"][0]["logprobs"]["tokens"]) == len(IDS)
        status, refused = await c.post("/v1/completions", {"prompt": IDS, "max_tokens": 0})
        assert (status, refused["error"]["param"]) == (400, "max_tokens")

    in_cluster(model_folder, scenario)


def test_sglangs_input_logprobs(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body: dict[str, Any] = {
            "input_ids": IDS, "sampling_params": {"max_new_tokens": 3}, "return_logprob": True,
            "logprob_start_len": 4, "top_logprobs_num": 2, "return_text_in_logprobs": True,
        }  # fmt: skip
        _, answer = await c.post("/generate", body)
        meta = answer["meta_info"]
        scores = expected_prompt_logprobs(IDS, 2)[4:]
        first, *others = meta["input_token_logprobs"]
        assert first == [None, IDS[4], c.codec.decode([IDS[4]])]
        assert [entry[0] for entry in others] == [pytest.approx(s.logprob) for s in scores]
        assert [entry[1] for entry in others] == IDS[5:]
        assert all(entry[2] == c.codec.decode([entry[1]]) for entry in meta["input_token_logprobs"])
        assert meta["input_top_logprobs"][0] is None
        assert [len(tops) for tops in meta["input_top_logprobs"][1:]] == [2] * 5
        assert len(meta["output_token_logprobs"]) == 3

        parts = chunks_of(await c.lines("/generate", {**body, "stream": True}))
        assert parts[0]["meta_info"]["input_token_logprobs"] == meta["input_token_logprobs"]
        assert parts[-1]["meta_info"] == {**meta, "id": parts[-1]["meta_info"]["id"]}

        score = {**body, "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
        _, answer = await c.post("/generate", score)
        assert (answer["text"], answer["output_ids"]) == ("", [])
        meta = answer["meta_info"]
        assert (meta["completion_tokens"], meta["output_token_logprobs"]) == (0, [])
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert len(meta["input_token_logprobs"]) == len(IDS)

        both = {
            **body, "input_ids": [IDS, IDS[:3]], "return_logprob": [True, False],
            "logprob_start_len": [-1, 0], "top_logprobs_num": [0, 2],
        }  # fmt: skip
        _, answers = await c.post("/generate", both)
        assert answers[0]["meta_info"]["input_token_logprobs"] == []
        assert "input_top_logprobs" not in answers[0]["meta_info"]
        assert "output_token_logprobs" not in answers[1]["meta_info"]

    in_cluster(model_folder, scenario)


def test_best_of_draws_more_than_it_answers(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body = {"prompt": [IDS, IDS[:4]], "n": 2, "best_of": 3, "max_tokens": 4, "echo": True}
        status, answer = await c.post("/v1/completions", body)
        assert status == 200
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [
            c.codec.decode(ids) + c.text(4, ids) for ids in (IDS, IDS[:4]) for _ in "12"
        ]
        assert answer["usage"]["prompt_tokens"] == len(IDS) + 4
        assert answer["usage"]["completion_tokens"] == 6 * 4, "all that were drawn"
        assert len(c.nodes["p0"].got(Generate)) == 6
        chat = {"messages": [{"role": "user", "content": "hi"}], "best_of": 2, "max_tokens": 2}
        _, answer = await c.post("/v1/chat/completions", chat)
        assert [choice["logprobs"] for choice in answer["choices"]] == [None]

    in_cluster(model_folder, scenario)


def test_a_long_prompts_logprobs_do_not_hold_up_others(model_folder: Path) -> None:
    """So many that the answer is built in a thread; it is the same answer."""

    async def scenario(c: Cluster) -> None:
        prompt = [40 + i % 50 for i in range(500)]
        body = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 20}
        _, answer = await c.post("/v1/completions", body)
        (choice,) = answer["choices"]
        assert len(choice["prompt_logprobs"]) == 500
        assert len(choice["prompt_logprobs"][1]) == 20

    in_cluster(model_folder, scenario)
