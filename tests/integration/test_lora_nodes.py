"""Adapters on single nodes: real processes, over each node's own HTTP."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.adapters import greedy_tokens, make_adapters
from tests.cluster_fixture import cluster
from tests.integration.client import Client, client, dialled, eventually
from tests.processes import Fleet, Member, fleet, showing_logs
from tests.tiny_models import make_tiny_model

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BOUND_S = 10.0
"""How long a node may look at what is no adapter; it takes milliseconds on a quiet machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_adapters(folder, tmp_path_factory.mktemp("adapters"), ("all-8", "qv-4"))


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Fleet]:
    flags = {"num_pages": 64, "drain_s": 5, "max_loras_per_batch": 2}
    with fleet(folder, prefill=1, decode=1, node_flags=flags) as made:
        yield made


async def load(node: Client, name: str, path: Path | str, **more: object) -> tuple[int, Any]:
    return await node.post(
        "/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more}
    )


async def unload(node: Client, name: str) -> tuple[int, Any]:
    return await node.post("/unload_lora_adapter", {"lora_name": name})


async def listed(node: Client) -> dict[str, dict[str, Any]]:
    _, info = await node.get("/server_info")
    return {adapter["name"]: adapter for adapter in info["adapters"]}


def test_both_roles_load_tell_and_unload_the_same_content(
    running: Fleet, adapters: dict[str, Path]
) -> None:
    async def one(member: Member) -> str:
        async with client(member.url) as node:
            status, answer = await load(node, "a", adapters["all-8"], pinned=True)
            assert (status, answer["success"]) == (200, True), answer
            digest: str = answer["digest"]
            expected = {"name": "a", "digest": digest, "path": str(adapters["all-8"]), "rank": 8}
            assert (await listed(node))["a"] == expected | {"pinned": True}
            _, metrics = await node.get("/metrics")
            for line in (
                f'pdserve_lora_slots{{role="{member.role}",state="used"}} 1.0',
                f'pdserve_loras_in_memory{{role="{member.role}"}} 1.0',
                f'pdserve_loras_registered{{role="{member.role}"}} 1.0',
                f'pdserve_lora_running_requests{{adapter="a",role="{member.role}"}} 0.0',
            ):
                assert line in metrics, metrics
            status, answer = await load(node, "a", adapters["qv-4"])
            assert (status, "already loaded" in answer["error"]["message"]) == (400, True), answer
            status, answer = await load(node, "b", adapters["qv-4"], pinned=True)
            assert (status, "would starve" in answer["error"]["message"]) == (400, True), answer
            assert (await unload(node, "a"))[0] == 200
            status, answer = await unload(node, "a")
            assert (status, "was never loaded" in answer["error"]["message"]) == (400, True), answer
            assert await listed(node) == {}
            return digest

    async def run() -> None:
        async with showing_logs(running):
            digests = [await one(running[name]) for name in ("prefill-0", "decode-0")]
            assert digests[0] == digests[1]
            assert len(digests[0]) > 20

    asyncio.run(run())


# ---------------------------------------------------------------- what is no adapter


Spoil = Callable[[Path], object]
"""Makes something else of an adapter's folder."""


def _fifo(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoil


def _link(name: str, to: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(to)

    return spoil


def _sparse(name: str) -> Spoil:
    """Five gigabytes of nothing, which take no room on the disk."""
    return lambda folder: os.truncate(folder / name, 5 << 30)


def _text(name: str, text: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(text)


def _cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2)


SPOILT: dict[str, Spoil] = {
    "no config": lambda folder: (folder / CONFIG).unlink(),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "config is a fifo": _fifo(CONFIG),
    "weights are a fifo": _fifo(WEIGHTS),
    "config is endless": _link(CONFIG, "/dev/zero"),
    "weights are endless": _link(WEIGHTS, "/dev/zero"),
    "config links to itself": _link(CONFIG, CONFIG),
    "weights link to themselves": _link(WEIGHTS, WEIGHTS),
    "config is huge": _sparse(CONFIG),
    "config is deep": _text(CONFIG, b"[" * 900_000),
    "config is garbage": _text(CONFIG, b"\xff\xfe\x00{"),
    "weights have a long header": _text(WEIGHTS, b"\xff" * 8),
    "weights have a deep header": _text(WEIGHTS, (200_000).to_bytes(8, "little") + b"[" * 200_000),
    "weights are empty": _text(WEIGHTS, b""),
    "weights are cut off": _cut,
    "weights are pickled": lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
}


def test_what_is_no_adapter_is_refused_soon_and_the_node_goes_on(
    running: Fleet, adapters: dict[str, Path], tmp_path: Path
) -> None:
    paths: dict[str, Path] = {}
    for name, spoil in SPOILT.items():
        paths[name] = tmp_path / name.replace(" ", "-")
        shutil.copytree(adapters["qv-4"], paths[name])
        spoil(paths[name])
    os.mkfifo(tmp_path / "fifo")
    odd = {"a fifo": tmp_path / "fifo", "a device": Path("/dev/zero"), "nothing": tmp_path / "no"}

    async def refuse(node: Client, what: str, path: Path) -> None:
        began = time.monotonic()
        status, answer = await load(node, f"bad {what}", path)
        assert status == 400, (what, answer)
        assert answer["error"]["message"].count("\n") == 0, answer
        assert time.monotonic() - began < BOUND_S, what

    async def run() -> None:
        prompt = [5, 6, 7, 8]
        async with (
            showing_logs(running),
            client(running.url) as session,
            client(running["prefill-0"].url) as prefill,
            client(running["decode-0"].url) as decode,
        ):
            before = await session.tokens(prompt, 20)
            for what, path in (odd | paths).items():
                await refuse(prefill, what, path)
                await refuse(decode, what, path)
            assert await session.tokens(prompt, 20) == before
            for node in (prefill, decode):
                assert await listed(node) == {}
                assert (await load(node, "good", adapters["qv-4"]))[0] == 200
                assert (await unload(node, "good"))[0] == 200
        for member in running.nodes:
            assert "Traceback" not in member.log(), member.log()

    asyncio.run(run())


# ---------------------------------------------------------------- in mid-load


async def half_way(member: Member, path: Path) -> "asyncio.Task[tuple[int, Any]]":
    """A load that the node has been asked for and cannot have begun to answer: it is stopped."""
    member.signal(signal.SIGSTOP)

    async def ask() -> tuple[int, Any]:
        async with client(member.url) as node:
            return await load(node, "a", path)

    asked = asyncio.create_task(ask())
    await asyncio.sleep(0.2)  # the request lies in the stopped process's socket
    assert not asked.done()
    return asked


def test_a_node_killed_in_mid_load_comes_back_without_it(
    running: Fleet, adapters: dict[str, Path]
) -> None:
    async def run() -> None:
        member = running["decode-0"]
        async with showing_logs(running), client(running.url) as session:
            before = await session.tokens([9, 8, 7], 12)
            asked = await half_way(member, adapters["all-8"])
            member.kill()
            with pytest.raises(aiohttp.ClientError):
                await asked
            member.start()
            await running.ready()
            async with client(member.url) as node:
                assert await listed(node) == {}
                assert (await load(node, "a", adapters["all-8"]))[0] == 200
                assert (await unload(node, "a"))[0] == 200
            assert await session.tokens([9, 8, 7], 12) == before

    asyncio.run(run())


def test_a_node_asked_to_leave_in_mid_load_leaves(
    running: Fleet, adapters: dict[str, Path]
) -> None:
    async def run() -> None:
        member = running["prefill-0"]
        async with showing_logs(running):
            before = member.log()
            asked = await half_way(member, adapters["all-8"])
            member.signal(signal.SIGTERM)
            member.signal(signal.SIGCONT)
            assert await member.ended(20) == 0
            said = member.log().removeprefix(before)
            assert " drained" in said, said
            assert "Traceback" not in said, said
            with contextlib.suppress(aiohttp.ClientError):
                status, answer = await asked
                assert status in (200, 400), answer
            member.start()
            await running.ready()

    asyncio.run(run())


def test_a_load_goes_on_when_its_client_hangs_up(running: Fleet, adapters: dict[str, Path]) -> None:
    async def run() -> None:
        member = running["decode-0"]
        body = json.dumps({"lora_name": "left", "lora_path": str(adapters["all-8"])}).encode()
        head = f"POST /load_lora_adapter HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        async with showing_logs(running), client(member.url) as node:
            async with dialled(member.url) as (_, writer):
                writer.write(head.encode() + body)
                await writer.drain()

            async def there() -> bool:
                return "left" in await listed(node)

            await eventually(there, BOUND_S)
            assert (await unload(node, "left"))[0] == 200

    asyncio.run(run())


def test_a_cluster_starts_with_the_adapters_of_its_flags(
    folder: Path, adapters: dict[str, Path]
) -> None:
    path = adapters["all-8"]
    prompt = [9, 8, 7, 6, 5]
    with cluster(folder, lora=f"a={path}", max_lora_rank=16) as made:
        there = {model["id"] for model in made.get("/v1/models")["data"]}
        assert there == {"tiny", "a"}
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        tokens = made.post("/generate", body | {"lora_path": "a"})["output_ids"]
        assert tokens == greedy_tokens(folder, path, prompt, 12)
        assert made.post("/generate", body)["output_ids"] == greedy_tokens(folder, None, prompt, 12)
