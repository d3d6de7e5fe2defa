"""`pdserve chat`: a conversation in the terminal, answers streamed as they come.

Ctrl-C stops the answer that is being given, and what was said of it stays in the conversation.
`/new` forgets the conversation; `/exit`, Ctrl-D, or Ctrl-C at the prompt leave.
"""

import asyncio
import os
import sys
from collections.abc import Callable

from common.credentials import Secret
from deploy.access import own_key
from deploy.config import ChatConfig
from deploy.endpoint import Endpoint, EndpointError, Message
from deploy.errors import StartupError

PROMPT = "> "


class Conversation:
    """What was said so far, as the endpoint wants to hear it each time."""

    def __init__(self, config: ChatConfig, model: str, key: Secret | None = None) -> None:
        self._url = config.url
        self._key = key
        self._model = model
        self._system = config.system
        given = {"max_tokens": config.max_tokens, "temperature": config.temperature}
        self._sampling = {name: value for name, value in given.items() if value is not None}
        self.messages: list[Message] = []
        self.forget()

    def forget(self) -> None:
        """Begin anew, with the system message if there is one."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, text: str, write: Callable[[str], object]) -> None:
        """Stream the answer to `write`. Raises EndpointError, and then forgets the question."""
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            asyncio.run(self._stream(said, write))
        except KeyboardInterrupt:
            write(" [stopped]")
        except EndpointError:
            if not said:
                self.messages.pop()
                raise
            write(" [broken off]")
        self.messages.append({"role": "assistant", "content": "".join(said)})

    async def _stream(self, said: list[str], write: Callable[[str], object]) -> None:
        async with Endpoint(self._url, self._key) as endpoint:
            async for piece in endpoint.chat(self._model, self.messages, **self._sampling):
                said.append(piece)
                write(piece)


def run_chat(config: ChatConfig) -> int:
    """Talk until the user leaves. The API key, if one is needed, is read from PDSERVE_API_KEY.

    Raises:
        StartupError: nobody answers at the URL, or not to us.
    """
    key = own_key(os.environ)
    try:
        model = config.model or asyncio.run(_first_model(config.url, key))
    except EndpointError as error:
        raise StartupError(f"no endpoint: {error}") from error
    if sys.stdin.isatty():
        _enable_line_editing()
        print(f"{model} at {config.url}. /new forgets, /exit leaves, Ctrl-C stops an answer.")
    conversation = Conversation(config, model, key)
    while (text := _read()) is not None:
        if text == "/new":
            conversation.forget()
        elif text:
            _answer(conversation, text)
    return 0


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401 (importing it is what gives input() its editing)
    except ImportError:
        return  # some Python builds lack it; typing works without


def _read() -> str | None:
    """The next line; None when the user leaves."""
    try:
        text = input(PROMPT if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if text in ("/exit", "/quit") else text


def _answer(conversation: Conversation, text: str) -> None:
    try:
        conversation.ask(text, lambda piece: print(piece, end="", flush=True))
        print()
    except EndpointError as error:
        print(f"error: {error}", file=sys.stderr)


async def _first_model(url: str, key: Secret | None) -> str:
    async with Endpoint(url, key) as endpoint:
        return await endpoint.first_model()
