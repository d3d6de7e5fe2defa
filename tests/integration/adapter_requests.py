"""What tests ask of a cluster of stand-in nodes about adapters."""

import asyncio
from typing import Any

from common.messages import Admin
from tests.integration.router_rig import IDS, Cluster
from tests.standin import StandIn, expected_tokens


def put_on_disk(c: Cluster, **contents: str) -> None:
    """Each node can read `/NAME`."""
    for node in c.nodes.values():
        node.disk.update({f"/{name}": digest for name, digest in contents.items()})


async def load(c: Cluster, name: str, path: str | None = None, **more: Any) -> tuple[int, Any]:
    body = {"lora_name": name, "lora_path": path or f"/{name}", **more}
    return await c.post("/load_lora_adapter", body)


async def unload(c: Cluster, name: str) -> tuple[int, Any]:
    return await c.post("/unload_lora_adapter", {"lora_name": name})


async def ask(c: Cluster, model: str, max_tokens: int = 5, **more: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": IDS, "max_tokens": max_tokens, **more}
    return await c.post("/v1/completions", body)


def text(c: Cluster, count: int, digest: str) -> str:
    return c.codec.decode(expected_tokens(IDS, count, digest))


def verbs(node: StandIn, kind: type) -> list[object]:
    return [m.verb for m in node.got(Admin) if isinstance(m, Admin) and isinstance(m.verb, kind)]


async def joined(c: Cluster, node: StandIn) -> None:
    """Until the router gives it work."""
    async with asyncio.timeout(30):
        while True:
            nodes = {n["name"]: n for n in (await c.info())["nodes"]}
            if nodes.get(node.name, {}).get("equipped"):
                return
            await asyncio.sleep(0.02)
