"""Nodes whose pages go through host memory give transformers' greedy tokens, whoever stages.

Without a GPU the stage stands before a pool that is in host memory itself; all else is as it would
be: rings, questions, boxes, and NIXL between processes.
"""

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_fixture import cluster
from tests.faults.load import Load, make_work
from tests.faults.matrix import PATIENT
from tests.integration.client import client, eventually
from tests.integration.oracle import Oracle, random_prompt
from tests.processes import fleet, showing_logs
from tests.tiny_models import MAX_POSITIONS, make_tiny_model

PAGE, CHUNK = 16, 48
ON = "--transfer-staging on --staging-gib 0.0001"
"""A ring of 17 pages of the tiny model, or twice as many half pages."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize(
    ("prefill_args", "decode_args"),
    [
        (ON, ON),
        (ON, ""),
        ("", ON),
        (f"{ON} --tp 2", ON),
        (ON, f"{ON} --tp 2"),
    ],
    ids=["both", "prefill", "decode", "2 ranks to 1", "1 rank to 2"],
)
def test_staged_pages_are_the_right_ones(model: Path, prefill_args: str, decode_args: str) -> None:
    oracle = Oracle(model)
    chance = random.Random(prefill_args + decode_args)
    lengths = (1, PAGE, PAGE + 1, 3 * CHUNK + 5, MAX_POSITIONS - 24, 200, 300)
    prompts = [random_prompt(chance, length) for length in lengths]

    async def ask(url: str) -> tuple[list[list[int]], int]:
        async with client(url) as session:
            answers = await asyncio.gather(*(session.tokens(prompt, 20) for prompt in prompts))
            again = await session.tokens(prompts[4], 20)  # of which a prefix is cached
            await session.wait_idle()
            return [*answers, again], await session.counter("failed_writes")

    with cluster(
        model, page_size=PAGE, chunk_size=CHUNK, num_pages=200,
        prefill_args=prefill_args, decode_args=decode_args,
    ) as c:  # fmt: skip
        answers, failures = asyncio.run(ask(c.url))
        log = c.log()
    for prompt, answer in zip([*prompts, prompts[4]], answers, strict=True):
        assert answer == oracle.answer(prompt, 20), f"{len(prompt)} tokens"
    assert failures == 0
    assert log.count("staging: ") >= (ON in prefill_args) + (ON in decode_args)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ucx_tls", [None, "tcp"], ids=["default", "tcp"])
def test_killed_nodes_cost_no_request_and_no_page(model: Path, ucx_tls: str | None) -> None:
    """One of each role dies while staged pages are on their way; boxes and rings come home too: the
    same load is served again afterwards."""
    works = make_work(Oracle(model), random.Random(7), 24, (40, 300), (10, 60))
    flags: dict[str, Any] = {
        "page_size": PAGE, "chunk_size": CHUNK, "num_pages": 200, "lease_s": 2,
        "longest_post_s": 0.5, "peer_timeout_s": 2, "transfer_staging": "on",
        "staging_gib": 0.0001,
    }  # fmt: skip
    flags |= {} if ucx_tls is None else {"ucx_tls": ucx_tls}

    async def run() -> None:
        async with showing_logs(running), client(running.url) as session:
            for victim in ("prefill-1", "decode-1", None):
                async with Load(running.urls, works) as load:
                    if victim is not None:
                        await eventually(partial(heard, load, 20), 30)
                        running[victim].kill()
                    await load.finish()
                assert [s.describe() for s in load.streams if not s.is_right] == []
                if victim is not None:
                    running[victim].start()
                    await running.ready()
            await session.wait_idle()

    with fleet(
        model, prefill=2, decode=2, node_flags=flags,
        router_flags=PATIENT | {"heartbeat_s": 0.25, "node_timeout_s": 1.5},
    ) as running:  # fmt: skip
        asyncio.run(run())


async def heard(load: Load, tokens: int) -> bool:
    return load.heard >= tokens
