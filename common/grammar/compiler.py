"""Compiles grammars beside the engine, which never waits for it.

One thread, in the order of submission but for what was compiled before. The library drops the
interpreter's lock while it compiles; what it may cost was bounded by the router's check of the same
text.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from common.grammar.errors import GrammarError
from common.grammar.limits import COMPILE_STACK_BYTES
from common.grammar.store import GrammarStore
from common.mailbox import Mailbox
from common.plan import CompileGrammar, GrammarCompiled, GrammarEvent, GrammarFailed

log = logging.getLogger(__name__)

JOIN_S = 2.0
"""How long `close` waits."""


class GrammarCompiler:
    """Every command ends with one event, but for those that `close` overtakes.

    `submit` and `poll` are for one thread and never block. `wake` is called, on any thread, after
    something new became available to `poll`.
    """

    def __init__(self, store: GrammarStore) -> None:
        self._store = store
        self._mail: Mailbox[CompileGrammar, GrammarEvent] = Mailbox()
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to work; called once."""
        self._mail.wake = wake
        before = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        finally:
            threading.stack_size(before)

    def submit(self, commands: Sequence[CompileGrammar]) -> None:
        """What is compiled already does not wait behind what is not."""
        known = [command for command in commands if self._store.has(command.grammar)]
        if known:
            self._mail.publish([GrammarCompiled(command.room) for command in known])
        self._mail.post(command for command in commands if command not in known)

    def poll(self) -> list[GrammarEvent]:
        """Everything new, oldest first."""
        return self._mail.poll()

    def close(self) -> None:
        """End within `JOIN_S`. May be called again."""
        self._closing = True
        self._mail.commands.put(None)
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        with suppress(GrammarError):  # said again to whoever brings a grammar
            self._store.load()
        while not self._closing:
            command = self._mail.commands.get()
            if command is not None:
                self._mail.publish([self._compile(command)])

    def _compile(self, command: CompileGrammar) -> GrammarEvent:
        try:
            self._store.compiled(command.grammar)
        except GrammarError as error:
            return GrammarFailed(command.room, str(error))
        except Exception as error:
            log.exception("a grammar could not be compiled")
            return GrammarFailed(command.room, f"{type(error).__name__}: {error}")
        return GrammarCompiled(command.room)
