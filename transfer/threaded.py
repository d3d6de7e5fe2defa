"""A transfer backend with a thread of its own: it posts and polls, so that the engine never waits.

The engine thread puts commands into a queue and takes events out of another; between the two the
thread carries out commands, looks how posted writes fare, and sleeps as `transfer.pacing` says.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Generic, Protocol, TypeVar

from common.mailbox import Mailbox
from common.messages import PeerMemory
from common.plan import RenewLease, TransferCommand, TransferEvent
from transfer.boxes import Boxes
from transfer.courier import Fence, Order, fenced, refusals
from transfer.fences import FencedCourier
from transfer.pacing import Pacing
from transfer.poster import Poster, WriteAgent
from transfer.stage import PageStage
from transfer.staging import StagedCourier, inner_memory

log = logging.getLogger(__name__)

DRAIN_S = 2.0
"""How long `close` waits for posted writes before it ends the agent under them."""
JOIN_S = 15.0
"""How long `close` waits for the thread, which may be inside a post."""
LOOK_INTERVAL_S = 0.005
"""Between two looks while a long queue of commands is being worked off."""
FAULT_PAUSE_S = 0.5
"""Sleep after a failure that no peer explains, so that a lasting one does not flood the log."""
CLOSED = "this node's transfer is closed"

Handle = TypeVar("Handle")


def nothing() -> None:
    """What most threads need to begin with."""


class ClosableAgent(WriteAgent[Handle], Protocol[Handle]):
    """A write library that can be ended, and with it whatever still runs in it."""

    def close(self) -> None: ...


class ThreadedTransfer(Generic[Handle]):
    """A `TransferBackend` that drives an agent from its own thread. `clock` judges leases."""

    def __init__(
        self,
        agent: ClosableAgent[Handle],
        memory: PeerMemory,
        clock: Callable[[], float],
        pacing: Pacing,
        *,
        fence: Fence | None = None,
        stage: PageStage | None = None,
        boxes: Boxes | None = None,
        prepare_thread: Callable[[], None] = nothing,
    ) -> None:
        """`memory`: this rank's pool; what the agent knows of it is `stage`, where there is one."""
        self._agent = agent
        self._memory = memory
        poster = Poster(agent, inner_memory(memory), clock)
        self._courier = FencedCourier(StagedCourier(poster, memory, clock, stage, boxes))
        self._fence = fence
        self._prepare_thread = prepare_thread
        self._pacing = pacing
        self._mail: Mailbox[Order, TransferEvent] = Mailbox()
        self._closing = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    @property
    def memories(self) -> tuple[PeerMemory, ...]:
        return (self._memory,)

    # ------------------------------------------------------------ the engine thread

    def start(self, wake: Callable[[], None]) -> None:
        self._mail.wake = wake
        self._thread.start()

    def submit(self, commands: Sequence[TransferCommand]) -> None:
        self._mail.post(fenced(commands, self._fence))
        if self._closed:
            self._end_queued()

    def poll(self) -> list[TransferEvent]:
        return self._mail.poll()

    def close(self) -> None:
        """Bounded by `DRAIN_S` for posted writes plus `JOIN_S` for a post that blocks.

        A post that blocks for longer cannot be ended by anything but the end of this process, which
        has to follow at once: its writes get no event, and may still reach their peers until then.
        """
        if self._closed:
            return
        self._closing.set()
        self._mail.commands.put(None)
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        if self._thread.is_alive():
            log.error("the transfer thread is stuck in NIXL; its writes have no known end")
            return
        self._courier.abandon(CLOSED)  # lets go of the handles, which would keep the agent alive
        self._agent.close()
        self._closed = True
        self._end_queued()

    def _end_queued(self) -> None:
        """End commands that no thread will read any more."""
        refused = refusals(self._mail.unread(), CLOSED)
        if refused:
            self._mail.publish(refused)
        self._publish()

    # ------------------------------------------------------------ the transfer thread

    def _run(self) -> None:
        self._prepare_thread()
        last_happening = time.monotonic()
        while not self._closing.is_set():
            pause_s = self._pacing.pause_s(
                num_posted=self._courier.num_open,
                expecting=self._courier.expecting,
                quiet_s=time.monotonic() - last_happening,
            )
            try:
                if self._turn(pause_s):
                    last_happening = time.monotonic()
            except Exception:
                log.exception("a turn of the transfer thread failed")
                time.sleep(FAULT_PAUSE_S)
        try:
            self._drain()
        except Exception:
            log.exception("the transfer thread could not wait for its posted writes")

    def _drain(self) -> None:
        self._courier.stop(CLOSED)
        deadline = time.monotonic() + DRAIN_S
        while self._courier.num_open and time.monotonic() < deadline:
            self._courier.progress()
            self._publish()
            time.sleep(self._pacing.posted_s)

    def _turn(self, pause_s: float) -> bool:
        """Sleep, work off what was submitted, look. Says whether anything happened."""
        worked = self._work_off(pause_s)
        self._courier.progress()
        return self._publish() or worked

    def _work_off(self, pause_s: float) -> bool:
        """Wait for a command, `pause_s` at most; carry out what is queued until a look is due.

        Says whether there was work: a renewed lease tells only that a peer lives, and an idle link
        renews it twice a second.
        """
        worked = False
        try:
            command = self._mail.commands.get(timeout=pause_s)
        except Empty:
            return False
        look_at = time.monotonic() + LOOK_INTERVAL_S
        while command is not None:
            self._courier.handle(command)
            worked |= not isinstance(command, RenewLease)
            if self._closing.is_set() or time.monotonic() > look_at:
                break
            try:
                command = self._mail.commands.get_nowait()
            except Empty:
                break
        return worked

    def _publish(self) -> bool:
        events = self._courier.take_events()
        if events:
            self._mail.publish(events)
        return bool(events)
