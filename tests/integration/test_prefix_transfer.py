"""The second turn of a conversation sends only the pages that decode does not have, exactly, and
usage says what prefill did not compute; through every API, streamed and not."""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.tokens import TextCodec, load_codec
from tests.integration.client import Client, client, eventually
from tests.integration.oracle import Oracle, random_prompt
from tests.integration.prefix_rig import role_counter
from tests.processes import Fleet, fleet, showing_logs
from tests.tiny_models import make_tiny_model

PAGE = 16
FIRST, SECOND = 21, 9
"""Tokens of the two answers."""
NO_LOCAL = {"local_prefill_tokens": 0}
"""Flags of a router that lets decode compute no prompt."""

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True, slots=True)
class Bench:
    """One prefill and one decode node with room for everything, that never compute each other's."""

    fleet: Fleet
    oracle: Oracle
    codec: TextCodec


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = make_tiny_model("llama", Path(tmp_path_factory.mktemp("transfer")) / "model")
    flags = {"page_size": PAGE, "num_pages": 512, "chunk_size": 48}
    with fleet(model, prefill=1, decode=1, node_flags=flags, router_flags=NO_LOCAL) as made:
        yield Bench(made, Oracle(model), load_codec(model))


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: list[int]
    """As the nodes see it."""
    answer: list[int]
    body: dict[str, Any]


def ids_turns(bench: Bench, chance: random.Random) -> list[Turn]:
    """Token ids: the second prompt goes on from the first answer."""
    first = random_prompt(chance, 3 * PAGE + 5)
    answer = bench.oracle.answer(first, FIRST)
    second = first + answer + random_prompt(chance, PAGE + 3)
    return [
        Turn(first, answer, {"prompt": first}),
        Turn(second, bench.oracle.answer(second, SECOND), {"prompt": second}),
    ]


def generate_turns(bench: Bench, chance: random.Random) -> list[Turn]:
    return [
        Turn(turn.prompt, turn.answer, {"input_ids": turn.prompt})
        for turn in ids_turns(bench, chance)
    ]


def chat_turns(bench: Bench, chance: random.Random) -> list[Turn]:
    """What the assistant said is text again, and other tokens than it was; what stands before it
    is the same."""
    word = "".join(chance.choices("abcdefgh", k=60))
    messages = [{"role": "user", "content": f"{word}, what does that mean?"}]
    talk = [*messages, {"role": "assistant", "content": word}, {"role": "user", "content": "Why?"}]
    turns = []
    for said, count in ((messages, FIRST), (talk, SECOND)):
        text = bench.codec.render_chat(said)
        prompt = bench.codec.encode_now(text, add_special_tokens=False)
        turns.append(Turn(prompt, bench.oracle.answer(prompt, count), {"messages": said}))
    return turns


APIS = {
    "/generate": generate_turns,
    "/v1/completions": ids_turns,
    "/v1/chat/completions": chat_turns,
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", APIS)
def test_the_second_turn_sends_what_is_new(path: str, stream: bool, bench: Bench) -> None:
    first, second = APIS[path](bench, random.Random(f"{path} {stream}"))

    async def run() -> None:
        async with showing_logs(bench.fleet), client(bench.fleet.url) as session:
            page_bytes = await bytes_a_page(session)
            for turn, on_prefill, on_decode in (
                (first, 0, 0),
                (
                    second,
                    shared(second.prompt, first.prompt),
                    # The KV of the last token that was drawn was never computed.
                    shared(second.prompt, first.prompt + first.answer[:-1]),
                ),
            ):
                before = await role_counter(session, "prefill", "transferred_bytes")
                usage = await ask(session, path, turn, stream=stream)
                pages = -(-len(turn.prompt) // PAGE) - on_decode
                await sent(session, before + pages * page_bytes)
                assert usage == (len(turn.prompt), len(turn.answer), on_prefill * PAGE)
                await session.wait_idle()
                after = await role_counter(session, "prefill", "transferred_bytes")
                assert after == before + pages * page_bytes, "more was sent later"

    asyncio.run(run())


def shared(prompt: Sequence[int], earlier: Sequence[int]) -> int:
    """Whole pages at the beginning that are equal, without that of the last prompt token."""
    equal = sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(prompt, earlier, strict=False)))
    return min(equal, len(prompt) - 1) // PAGE


async def bytes_a_page(session: Client) -> int:
    node = (await session.nodes())[0]
    print_of = (await session.node_info(node))["fingerprint"]
    heads, width = print_of["num_kv_heads"], print_of["head_dim"]
    layer = 2 * heads * width * print_of["page_size"] * 4
    total: int = layer * print_of["num_layers"]
    return total


async def sent(session: Client, total: int) -> None:
    """Until prefill has sent so many bytes since it started."""

    async def done() -> bool:
        return await role_counter(session, "prefill", "transferred_bytes") >= total

    async def explain() -> object:
        return total, await role_counter(session, "prefill", "transferred_bytes")

    await eventually(done, 10, explain)
    assert await explain() == (total, total)


async def ask(session: Client, path: str, turn: Turn, *, stream: bool) -> tuple[int, int, int]:
    """Prompt tokens, output tokens and cached tokens, as usage has them."""
    count = len(turn.answer)
    if path == "/generate":
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        body = turn.body | {"sampling_params": sampling, "stream": stream}
        meta = (await last_chunk(session, path, body))["meta_info"]
        return meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]
    body = turn.body | {"max_tokens": count, "temperature": 0, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    usage = (await last_chunk(session, path, body))["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"], cached


async def last_chunk(session: Client, path: str, body: dict[str, Any]) -> Any:
    """The whole answer, or the last object of a stream."""
    if not body.get("stream"):
        status, answer = await session.post(path, body)
        assert status == 200, answer
        return answer
    async with aiohttp.request("POST", session.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        lines = (await response.text()).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return json.loads(data[-2])
