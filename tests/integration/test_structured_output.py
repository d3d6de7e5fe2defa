"""Structured output on real nodes: every answer validates, whatever happens to the nodes."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.cluster_fixture import Cluster, cluster
from tests.integration.client import Client, client
from tests.integration.structured import problem, response_format
from tests.tiny_models import make_tiny_model

MAX_TOKENS = 700
REQUESTS = 200
AT_ONCE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    return make_tiny_model("llama", folder, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Cluster]:
    """1P2D, and a router that refuses nobody on a slow machine."""
    sizes: dict[str, Any] = {"num_pages": 1300, "max_running_requests": AT_ONCE}
    with cluster(folder, decode=2, router_args="--max-queue-s 3600", **sizes) as c:
        yield c


def order(number: int, **fields: Any) -> dict[str, Any]:
    """One of the 200 requests: at temperature 1, each with its own seed."""
    return {
        "messages": [{"role": "user", "content": f"order {number}"}],
        "response_format": response_format(),
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "seed": number,
    } | fields


class Orders:
    """The requests under way: answers in order of their end."""

    def __init__(self, session: Client) -> None:
        self._session = session
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._ended = asyncio.Condition()
        self.texts: list[str] = []

    async def place(self, number: int) -> None:
        async with self._turns:
            status, answer = await self._session.post("/v1/chat/completions", order(number))
        assert status == 200, answer
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop", answer
        async with self._ended:
            self.texts.append(choice["message"]["content"])
            self._ended.notify_all()

    async def count(self, at_least: int) -> None:
        """Wait until so many have ended."""
        async with self._ended:
            await self._ended.wait_for(lambda: len(self.texts) >= at_least)


@pytest.mark.timeout(240)
def test_json_validates_in_200_of_200_runs_through_replays(running: Cluster) -> None:
    """Everything is retracted in mid-output three times, and a decode node killed."""

    async def run() -> list[str]:
        async with client(running.url, timeout_s=180) as session:
            orders = Orders(session)
            async with asyncio.TaskGroup() as group:
                for number in range(REQUESTS):
                    group.create_task(orders.place(number))
                for ended in (20, 60, 140):
                    await orders.count(ended)
                    status, answer = await session.post("/pause_generation", {"mode": "retract"})
                    assert status == 200, answer
                    status, answer = await session.post("/continue_generation", {})
                    assert status == 200, answer
                    if ended == 60:
                        assert await session.counter("retractions") >= 20
                        running.kill(running.nodes("decode")[0].name)
            return orders.texts

    texts = asyncio.run(run())
    assert len(texts) == REQUESTS
    assert [found for text in texts if (found := problem(text))] == []
    assert len(set(texts)) > REQUESTS // 2, "temperature 1 draws different orders"


@pytest.mark.parametrize(
    ("wish", "pattern"),
    [
        ({"guided_regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no", "per\u00e9haps"]}, "yes|no|per\u00e9haps"),
        ({"guided_grammar": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
        ({"structured_outputs": {"regex": "a{1,5}b"}}, "a{1,5}b"),
        ({"guided_regex": "a"}, "a"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_other_grammars(running: Cluster, wish: dict[str, Any], pattern: str, stream: bool) -> None:
    async def run() -> None:
        async with client(running.url) as session:
            for temperature in (0.0, 1.0, 2.0):
                body = {"prompt": "hello", "max_tokens": 64, "temperature": temperature}
                text, finish = await session.completion(**body, **wish, stream=stream)
                if finish == "stop":
                    assert re.fullmatch(pattern, text), text
                else:
                    assert "grammar" in str(wish), "only the brackets may go on for ever"

    asyncio.run(run())


def test_sglang_and_logprobs_beside_a_grammar(running: Cluster) -> None:
    async def run() -> None:
        async with client(running.url) as session:
            params = {"regex": "[ab]{4}", "max_new_tokens": 16, "ignore_eos": True}
            body = {"text": "hello", "sampling_params": params, "return_logprob": True}
            status, answer = await session.post("/generate", body)
            assert status == 200, answer
            assert re.fullmatch("[ab]{4}", answer["text"])
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"
            scores = answer["meta_info"]["output_token_logprobs"]
            assert len(scores) == answer["meta_info"]["completion_tokens"]

    asyncio.run(run())


def test_a_grammar_that_uses_up_its_limits_ends_its_own_request(running: Cluster) -> None:
    """It passes the check; the first tokens are drawn, and then it takes more than a node gives."""

    async def run() -> None:
        async with client(running.url) as session:
            good = asyncio.create_task(session.post("/v1/chat/completions", order(1)))
            body = {"prompt": "hello", "max_tokens": 64, "guided_regex": "(a?){1000}a{1000}"}
            status, answer = await session.post("/v1/completions", body)
            assert status == 400, answer
            assert "too many expressions" in answer["error"]["message"]
            status, answer = await good
            assert status == 200, answer
            assert problem(answer["choices"][0]["message"]["content"]) is None

    asyncio.run(run())


class Point(pydantic.BaseModel):
    """As an application would declare what it wants."""

    x: int = pydantic.Field(ge=-99, le=99)
    label: Literal["left", "right"]


def test_the_openai_client_parses_into_a_model(running: Cluster) -> None:
    async def run() -> None:
        messages: list[Any] = [{"role": "user", "content": "a point"}]
        given: dict[str, Any] = {"model": "llama", "messages": messages, "max_tokens": 300}
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as api:
            for seed in range(5):
                answer = await api.chat.completions.parse(**given, response_format=Point, seed=seed)
                assert isinstance(answer.choices[0].message.parsed, Point)
            async with api.chat.completions.stream(**given, response_format=Point) as stream:
                final = await stream.get_final_completion()
            assert isinstance(final.choices[0].message.parsed, Point)
            with pytest.raises(openai.BadRequestError, match="response_format"):
                await api.chat.completions.create(
                    **given, response_format={"type": "json_schema", "json_schema": {"name": "x"}}
                )

    asyncio.run(run())
