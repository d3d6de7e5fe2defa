"""`NodeIO`: how the engine thread reaches the network, and the thread behind it."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from common.events import AdminDone, Event, Shutdown
from common.messages import AdapterInfo, NodeStats
from common.node_io.addresses import Endpoint
from common.node_io.inbox import Inbox
from common.node_io.loop import IOLoop
from common.node_io.peer_side import PeerSide
from common.node_io.settings import IOSettings, NodeIdentity, Registration
from common.node_io.snapshot import Measured, Snapshot
from common.plan import Outgoing
from common.stats import RequestEnd, StageSample

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


class NodeIO:
    """Owns the I/O thread. Everything but `wake` and `ask_to_end` is for the engine's thread."""

    def __init__(self, identity: NodeIdentity, settings: IOSettings, peers: PeerSide) -> None:
        """`peers`: `PeerServer` for a prefill node, `PeerDialler` for a decode node.

        Raises ValueError for a router address that is not tcp://host:port.
        """
        for url in settings.routers:
            Endpoint.parse(url)
        self._identity = identity
        self._settings = settings
        self._peers = peers
        self._inbox = Inbox()
        self._snapshot = Snapshot()
        self._outgoing: deque[Outgoing | AdminDone] = deque()
        self._flush_due = False
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._asyncio: asyncio.AbstractEventLoop
        self._io: IOLoop
        self.url = ""
        """Base URL of this node's HTTP, as others reach it; known after `start`."""
        self.side_channel = ""
        """tcp://host:port that decode nodes dial; empty on a node that dials."""
        self.failed = False
        """The thread has ended by itself: this node can neither hear nor speak any more."""

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Bind all sockets and start the thread. Raises CannotBind."""
        self._thread = threading.Thread(target=self._run, name="pdserve-io", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            self.close()
            raise self._start_error

    def announce(self, registration: Registration) -> None:
        """Join the routers. Call once, when model, cache and transfer are registered."""
        self._call(lambda: self._io.announce(registration))

    def close(self, goodbye: bool = True) -> None:
        """End the thread and all its sockets, telling routers and peers first unless told not to.

        What was given to `send` before still leaves. Can be repeated.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            if self._start_error is None:
                self._call(lambda: self._io.stop(goodbye))
            thread.join(CLOSE_TIMEOUT_S)
            if thread.is_alive():
                log.error("the I/O thread did not end in %g s", CLOSE_TIMEOUT_S)
        self._inbox.close()

    # ------------------------------------------------------------ the engine's side

    def drain(self) -> list[Event]:
        """All events since the last call; never blocks."""
        return self._inbox.drain()

    def wait(self, timeout_s: float) -> None:
        """Sleep until something arrives, somebody wakes, or the time is over."""
        self._snapshot.rest()
        try:
            self._inbox.wait(timeout_s)
        finally:
            self._snapshot.rise()

    def wake(self) -> None:
        """Interrupt `wait`; any thread may call this."""
        self._inbox.wake()

    def ask_to_end(self, *, at_once: bool = False) -> None:
        """Let the engine find a `Shutdown`; any thread or signal handler may call this."""
        self._inbox.put(Shutdown(at_once))

    def send(self, messages: Sequence[Outgoing | AdminDone]) -> None:
        """Hand messages over; never blocks. Order is kept on each link."""
        if not messages:
            return
        self._outgoing.extend(messages)
        if not self._flush_due:
            self._flush_due = True
            self._call(self._flush)

    def publish(
        self,
        stats: NodeStats,
        *,
        adapters: tuple[AdapterInfo, ...] = (),
        samples: Sequence[StageSample] = (),
        transferred: Sequence[tuple[int, float]] = (),
        ends: Sequence[RequestEnd] = (),
    ) -> None:
        """A turn has ended: the newest stats, and what was measured since the last call.

        Cheap: metrics and log lines are made by the I/O thread, at most a heartbeat later. A new
        state, a new link, or other adapters go to the routers at once, and before whatever is given
        to `send` after this.
        `adapters`: all this node can serve, one object until that changes. `transferred`: (bytes,
        seconds) of finished writes.
        """
        before, had = self._snapshot.stats, self._snapshot.adapters
        self._snapshot.post(stats, Measured(samples, transferred, ends), adapters)
        is_news = (stats.state, stats.linked_peers) != (before.state, before.linked_peers)
        if is_news or adapters is not had:
            self._call(self._io.beat_now)

    def _call(self, action: Callable[[], object]) -> None:
        if not self._started.is_set():
            raise RuntimeError("NodeIO is not started")
        try:
            self._asyncio.call_soon_threadsafe(action)
        except RuntimeError:
            log.debug("the I/O thread has ended")

    # ------------------------------------------------------------ the thread

    def _flush(self) -> None:
        """In the loop. The flag falls first: what is appended from here on asks again."""
        self._flush_due = False
        while self._outgoing:
            try:
                self._io.send(self._outgoing.popleft())
            except Exception:  # one message's bug is not the node's end
                log.exception("a message could not be sent")

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            if self._started.is_set():
                self.failed = True
                log.critical("the I/O thread failed; this node ends", exc_info=True)
                self._inbox.put(Shutdown(at_once=True))
            else:
                self._start_error = error
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._asyncio = asyncio.get_running_loop()
        settings = self._settings
        io = IOLoop(self._identity, settings, self._peers, self._inbox, self._snapshot)
        self._io = io
        try:
            await io.open()
            self.url, self.side_channel = io.url, io.side_channel
            self._started.set()
            await io.beat()
        finally:
            await io.close()
