"""The NIXL backend: one agent, one thread that posts and polls. All of `nixl` stays in this file.

Measured with nixl 1.5.1 (UCX): a post copies in the calling thread and can block for hundreds of
milliseconds, hence the thread; the library's progress thread spins on a core and halves the
bandwidth where cores are few, hence it is off and the looks of `transfer.pacing` drive everything;
failures come as exceptions, and metadata that is nearly right poisons the agent name it carries
for the life of this process, hence a digest in front of it.
"""

import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

from common.messages import Incarnation, PeerMemory
from common.plan import TransferCommand, TransferEvent, Write
from transfer.layout import page_indices, page_rows
from transfer.pacing import Pacing
from transfer.poster import Poster, WriteState, describe

log = logging.getLogger(__name__)

DIGEST_BYTES = 16
SETTLE_S = 0.05
"""Between a write's failure and its `WriteFailed`: what a broken connection had already delivered
to the receiver's host is taken in there meanwhile, and UCX lets go of the source pages."""
DRAIN_S = 2.0
"""How long `close` waits for posted writes before it ends the agent under them."""
JOIN_S = 15.0
"""How long `close` waits for the thread, which may be inside a post."""
MAX_LOOK_INTERVAL_S = 0.005
"""Between two looks while a long queue of commands is being worked off."""
CLOSED = "this node's transfer is closed"

if "NIXL_LOG_LEVEL" not in os.environ:
    logging.getLogger("nixl").setLevel(logging.WARNING)


def seal(metadata: bytes) -> bytes:
    """Agent metadata as it travels: with a digest in front."""
    return hashlib.blake2b(metadata, digest_size=DIGEST_BYTES).digest() + metadata


def unseal(sealed: bytes) -> bytes:
    """The metadata; raises ValueError if it is not what `seal` made."""
    digest, metadata = sealed[:DIGEST_BYTES], sealed[DIGEST_BYTES:]
    if hashlib.blake2b(metadata, digest_size=DIGEST_BYTES).digest() != digest:
        raise ValueError("the agent metadata is damaged")
    return metadata


@dataclass(slots=True)
class PostedTransfer:
    """A NIXL transfer that may still run."""

    handle: Any
    state: str = "PROC"
    error: str = ""
    failed_at: float = 0.0


class NixlAgent:
    """The write primitives over one NIXL agent; used by one thread at a time."""

    def __init__(self, memory: PeerMemory, backend_params: dict[str, str]) -> None:
        config = nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._agent: Any = nixl_agent(memory.agent_name, config)
        self._agent.create_backend("UCX", dict(backend_params))
        size = memory.num_pages * memory.page_bytes
        self._registered: Any = self._agent.register_memory(
            [(memory.base_address, size, memory.device_id, "")], memory.kind
        )
        self._local: Any = self._prepare("NIXL_INIT_AGENT", memory)
        self._remote: dict[str, Any] = {}

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, memory: PeerMemory) -> None:
        """Load metadata, describe the pool, begin to connect. Raises whatever NIXL does."""
        metadata = unseal(memory.metadata)
        try:
            name = self._agent.add_remote_agent(metadata)
            if isinstance(name, bytes):
                name = name.decode()
            if name != memory.agent_name:
                if name not in self._remote:
                    self._agent.remove_remote_agent(name)
                raise ValueError(f"the metadata is of agent {name!r}, not {memory.agent_name!r}")
            self._agent.make_connection(name)
            self._remote[name] = self._prepare(name, memory)
        except Exception:
            self._forget_agent(memory.agent_name)
            raise

    def remove_peer(self, memory: PeerMemory) -> None:
        self._remote.pop(memory.agent_name).release()
        self._agent.remove_remote_agent(memory.agent_name)

    def post(self, memory: PeerMemory, write: Write) -> PostedTransfer:
        handle = self._agent.make_prepped_xfer(
            "WRITE",
            self._local,
            page_indices(write.source_pages),
            self._remote[memory.agent_name],
            page_indices(write.target_pages),
            write.notification,
        )
        posted = PostedTransfer(handle)
        # A post that raises may have sent some pages: it ends like any broken write.
        self._take(posted, self._agent.transfer)
        return posted

    def state(self, posted: PostedTransfer) -> WriteState:
        if posted.state == "PROC":
            self._take(posted, self._agent.check_xfer_state)
        if posted.state == "PROC":
            return WriteState.POSTED
        if posted.state == "DONE":
            posted.handle.release()
            return WriteState.LANDED
        if time.monotonic() - posted.failed_at < SETTLE_S:
            return WriteState.POSTED
        try:
            posted.handle.release()
        except Exception:
            # Still active, and not freed: ask again.
            return WriteState.POSTED
        return WriteState.BROKEN

    def error(self, posted: PostedTransfer) -> str:
        return posted.error

    def notifications(self) -> list[bytes]:
        by_agent: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return [payload for payloads in by_agent.values() for payload in payloads]

    def close(self) -> None:
        """Destroy the agent, and with it every connection and whatever still runs on one."""
        self._remote.clear()
        self._local = None
        try:
            self._agent.deregister_memory(self._registered)
        except Exception as error:
            log.warning("could not deregister the pool: %s", describe(error))
        self._registered = None
        self._agent = None

    def _take(self, posted: PostedTransfer, ask: Callable[[Any], str]) -> None:
        """Call `ask` and note the answer; a state, or in practice an exception, is a failure."""
        try:
            posted.state = ask(posted.handle)
        except Exception as error:
            posted.state, posted.error = "ERR", describe(error)
        if posted.state == "ERR":
            posted.error = posted.error or "NIXL reports an error"
            posted.failed_at = time.monotonic()

    def _prepare(self, name: str, memory: PeerMemory) -> Any:
        rows = page_rows(memory.base_address, memory.num_pages, memory.page_bytes, memory.device_id)
        return self._agent.prep_xfer_dlist(name, rows, memory.kind)

    def _forget_agent(self, name: str) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            log.debug("nothing of agent %s to drop: %s", name, describe(error))


class NixlTransfer:
    """A `TransferBackend` over NIXL.

    The pool (`num_pages` pieces of `page_bytes` from `pool_address`) is registered once and must
    outlive `close`. `backend_params` go to NIXL's UCX backend; `UCX_*` variables of the environment
    are read when this is constructed. `kind` is DRAM or VRAM. `clock` judges leases. Raises what
    NIXL raises when the agent or the registration fails.
    """

    def __init__(
        self,
        pool_address: int,
        num_pages: int,
        page_bytes: int,
        incarnation: Incarnation,
        backend_params: dict[str, str],
        kind: str = "DRAM",
        device_id: int = 0,
        clock: Callable[[], float] = time.monotonic,
        pacing: Pacing | None = None,
    ) -> None:
        described = PeerMemory(
            agent_name=f"pdserve-{incarnation}",
            metadata=b"",
            base_address=pool_address,
            num_pages=num_pages,
            page_bytes=page_bytes,
            device_id=device_id,
            kind=kind,
        )
        self._agent = NixlAgent(described, backend_params)
        self._memory = PeerMemory(
            agent_name=described.agent_name,
            metadata=seal(self._agent.metadata()),
            base_address=pool_address,
            num_pages=num_pages,
            page_bytes=page_bytes,
            device_id=device_id,
            kind=kind,
        )
        self._poster = Poster(self._agent, num_pages, page_bytes, clock)
        self._pacing = pacing or Pacing()
        self._commands: SimpleQueue[TransferCommand | None] = SimpleQueue()
        self._events: deque[TransferEvent] = deque()
        self._closing = threading.Event()
        self._closed = False
        self._wake: Callable[[], None] = _no_one
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    @property
    def memory(self) -> PeerMemory:
        return self._memory

    # ------------------------------------------------------------ the engine thread

    def start(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._thread.start()

    def submit(self, commands: Sequence[TransferCommand]) -> None:
        for command in commands:
            self._commands.put(command)
        if self._closed:
            self._end_queued()

    def poll(self) -> list[TransferEvent]:
        events: list[TransferEvent] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Bounded by `DRAIN_S` for posted writes plus `JOIN_S` for a post that blocks."""
        if self._closed:
            return
        self._closing.set()
        self._commands.put(None)
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        if self._thread.is_alive():
            log.error("the transfer thread is stuck in NIXL; its writes have no known end")
            return
        self._poster.abandon(CLOSED)  # lets go of the handles, which would keep the agent alive
        self._agent.close()
        self._closed = True
        self._end_queued()

    def _end_queued(self) -> None:
        """End commands that no thread will read any more."""
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                break
            if command is not None:
                self._poster.refuse([command], CLOSED)
        self._publish()

    # ------------------------------------------------------------ the transfer thread

    def _run(self) -> None:
        last_happening = time.monotonic()
        while not self._closing.is_set():
            pause_s = self._pacing.pause_s(
                num_posted=self._poster.num_posted,
                expecting=self._poster.expecting,
                quiet_s=time.monotonic() - last_happening,
            )
            try:
                if self._turn(pause_s):
                    last_happening = time.monotonic()
            except Exception:
                log.exception("a turn of the transfer thread failed")
                time.sleep(self._pacing.idle_s)
        deadline = time.monotonic() + DRAIN_S
        while self._poster.num_posted and time.monotonic() < deadline:
            self._poster.progress()
            self._publish()
            time.sleep(self._pacing.posted_s)

    def _turn(self, pause_s: float) -> bool:
        """Sleep, work off what was submitted, look. Says whether anything happened."""
        happened = False
        try:
            command = self._commands.get(timeout=pause_s)
            look_at = time.monotonic() + MAX_LOOK_INTERVAL_S
            while command is not None and not self._closing.is_set():
                happened = True
                self._poster.handle(command)
                if time.monotonic() > look_at:
                    break
                command = self._commands.get_nowait()
            else:
                self._commands.put(command)
        except Empty:
            pass
        self._poster.progress()
        return self._publish() or happened

    def _publish(self) -> bool:
        events = self._poster.take_events()
        if events:
            self._events.extend(events)
            self._wake()
        return bool(events)


def _no_one() -> None:
    """The wake-up before `start`."""
