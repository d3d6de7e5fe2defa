"""A small client of the router's HTTP: is it serving, who has joined, and a streamed chat."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from common.credentials import Secret

Message = Mapping[str, str]


class EndpointError(Exception):
    """The endpoint answered with an error, or not at all; the message says which."""


class Endpoint:
    """One base URL. An async context manager: it holds an HTTP session."""

    def __init__(self, url: str, key: Secret | None = None) -> None:
        """`key`: what to show where the endpoint asks for one."""
        self.url = url.rstrip("/")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key.reveal()}"}
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> "Endpoint":
        # An answer may take as long as it takes; only the connection is bounded.
        timeout = aiohttp.ClientTimeout(total=None, connect=10.0)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def serves(self) -> bool:
        """Whether a generated token came back just now."""
        try:
            async with self._session.get(f"{self.url}/health_generate") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def nodes(self) -> list[dict[str, Any]]:
        """The nodes that have joined; empty while the endpoint is not up."""
        try:
            info = await self._get("/get_server_info")
        except EndpointError:
            return []
        nodes: list[dict[str, Any]] = info["nodes"]
        return nodes

    async def first_model(self) -> str:
        """The name of the first model that is served."""
        models = (await self._get("/v1/models"))["data"]
        if not models:
            raise EndpointError(f"{self.url} serves no model")
        return str(models[0]["id"])

    async def chat(
        self, model: str, messages: Sequence[Message], **sampling: object
    ) -> AsyncIterator[str]:
        """The answer's text, piece by piece. Raises EndpointError."""
        body = {"model": model, "messages": list(messages), "stream": True, **sampling}
        url = f"{self.url}/v1/chat/completions"
        try:
            async with self._session.post(url, json=body) as response:
                if response.status != 200:
                    raise EndpointError(_reason(response.status, await response.text()))
                async for line in response.content:
                    piece = _piece(line)
                    if piece is None:
                        return
                    if piece:
                        yield piece
        except aiohttp.ClientError as error:
            raise EndpointError(f"{self.url}: {error}") from error

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            async with self._session.get(self.url + path) as response:
                text = await response.text()
        except aiohttp.ClientError as error:
            raise EndpointError(f"{self.url}: {error}") from error
        if response.status != 200:
            raise EndpointError(_reason(response.status, text))
        answer: dict[str, Any] = json.loads(text)
        return answer


def _piece(line: bytes) -> str | None:
    """The text in one line of an event stream; None at its end."""
    if not line.startswith(b"data: "):
        return ""
    data = line.removeprefix(b"data: ").strip()
    if data == b"[DONE]":
        return None
    event = json.loads(data)
    if "error" in event:
        raise EndpointError(str(event["error"]["message"]))
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _reason(status: int, text: str) -> str:
    """What an error answer says, or the answer itself where it is not of the usual form."""
    try:
        return f"{status}: {json.loads(text)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {text.strip()[:200]}"
