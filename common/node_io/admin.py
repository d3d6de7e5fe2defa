"""Administrative verbs on their way to the engine and back, from routers and from HTTP alike."""

import asyncio
import itertools
from collections.abc import Callable

from common.events import AdminDone, AdminRequest
from common.messages import AdminVerb
from common.node_io.inbox import Inbox
from common.tally import Tally

Answer = Callable[[AdminDone], None]


class AdminDesk:
    """Hands out tickets; each is answered once, or forgotten by whoever asked."""

    def __init__(self, inbox: Inbox, tally: Tally) -> None:
        self._inbox = inbox
        self._tally = tally
        self._tickets = itertools.count(1)
        self._waiting: dict[int, Answer] = {}

    def ask(self, verb: AdminVerb, answer: Answer) -> int:
        """Pass a verb to the engine; `answer` is called in the loop with its `AdminDone`."""
        ticket = next(self._tickets)
        self._waiting[ticket] = answer
        self._inbox.put(AdminRequest(ticket, verb))
        return ticket

    def done(self, done: AdminDone) -> None:
        """The engine has answered."""
        answer = self._waiting.pop(done.ticket, None)
        if answer is None:
            self._tally.add("late_admin_answers")
        else:
            answer(done)

    async def carry_out(self, verb: AdminVerb, timeout_s: float) -> AdminDone:
        """Ask and wait. Raises TimeoutError; the engine may still do it later."""
        answered: asyncio.Future[AdminDone] = asyncio.get_running_loop().create_future()
        ticket = self.ask(verb, lambda done: None if answered.done() else answered.set_result(done))
        try:
            return await asyncio.wait_for(answered, timeout_s)
        finally:
            self._waiting.pop(ticket, None)
