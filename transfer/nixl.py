"""The NIXL backend. All of `nixl` stays in this file.

Measured with nixl 1.5.1 (UCX): a post copies in the calling thread and can block for hundreds of
milliseconds, hence the thread; the library's progress thread spins on a core and halves the
bandwidth where cores are few, hence it is off and the looks of `transfer.pacing` drive everything;
failures come as exceptions, and metadata that is nearly right poisons the agent name it carries
for the life of this process, hence a digest in front of it.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

from common.messages import Incarnation, PeerMemory, StageArea
from common.plan import Write
from transfer.boxes import LOOK_BOXES, Boxes, Words
from transfer.courier import Fence
from transfer.handshake import heads_of
from transfer.layout import check_layout, common_rows, page_indices, page_rows, word_rows
from transfer.pacing import Pacing
from transfer.poster import WriteState, describe
from transfer.stage import PageStage
from transfer.staging import inner_memory, stage_area
from transfer.threaded import ThreadedTransfer, nothing

log = logging.getLogger(__name__)

DIGEST_BYTES = 16
SETTLE_S = 0.05
"""Between a write's failure and its `WriteFailed`: what a broken connection had already delivered
to the receiver's host is taken in there meanwhile, and UCX lets go of the source pages."""

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
    read: Words | None = None
    """Where a look puts what it reads."""
    state: str = "PROC"
    error: str = ""
    failed_at: float = 0.0


@dataclass(slots=True)
class RemoteBoxes:
    """A peer's boxes, and the memory into which they are read."""

    there: Any
    words: Words
    here: Any
    registered: Any


class NixlAgent:
    """The write primitives over one NIXL agent; used by one thread at a time.

    `memory` is what is registered for peers' writes and read for own ones, `boxes` what peers may
    look into.
    """

    def __init__(
        self,
        memory: PeerMemory,
        num_layers: int,
        backend_params: dict[str, str],
        boxes: Boxes | None = None,
    ) -> None:
        config = nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._agent: Any = nixl_agent(memory.agent_name, config)
        self._agent.create_backend("UCX", dict(backend_params))
        size = memory.num_pages * memory.page_bytes
        self._registered = [
            self._agent.register_memory(
                [(memory.base_address, size, memory.device_id, "")], memory.kind
            )
        ]
        if boxes is not None:
            self._registered.append(self._register_words(boxes.words))
        self._memory = memory
        self._num_layers = num_layers
        self._local: Any = self._prepare("NIXL_INIT_AGENT", memory)
        self._remote: dict[str, Any] = {}
        """By agent name, the whole pages of its pool; None where it has other heads than this."""
        self._boxes: dict[str, RemoteBoxes] = {}
        """By agent name, of those that have any."""

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
            whole = heads_of(memory) == heads_of(self._memory)
            self._remote[name] = self._prepare(name, memory) if whole else None
            if memory.stage is not None:
                self._boxes[name] = self._describe_boxes(name, memory.stage)
        except Exception:
            self._forget_agent(memory.agent_name)
            raise

    def remove_peer(self, memory: PeerMemory) -> None:
        pages = self._remote.pop(memory.agent_name)
        if pages is not None:
            pages.release()
        boxes = self._boxes.pop(memory.agent_name, None)
        if boxes is not None:
            boxes.there.release()
            boxes.here.release()
            self._agent.deregister_memory(boxes.registered)
        self._agent.remove_remote_agent(memory.agent_name)

    def post(self, memory: PeerMemory, write: Write) -> PostedTransfer:
        pages = self._remote[memory.agent_name]
        if pages is None:
            handle = self._some_heads(memory, write)
        else:
            handle = self._agent.make_prepped_xfer(
                "WRITE",
                self._local,
                page_indices(write.source_pages),
                pages,
                page_indices(write.target_pages),
                write.notification,
            )
        posted = PostedTransfer(handle)
        # A post that raises may have sent some pages: it ends like any broken write.
        self._take(posted, self._agent.transfer)
        return posted

    def notify(self, memory: PeerMemory, payload: bytes) -> None:
        self._agent.send_notif(memory.agent_name, payload)

    def look(self, memory: PeerMemory, boxes: Sequence[int]) -> PostedTransfer:
        known = self._boxes[memory.agent_name]
        here = page_indices(range(len(boxes)))
        handle = self._agent.make_prepped_xfer(
            "READ", known.here, here, known.there, page_indices(boxes), b""
        )
        posted = PostedTransfer(handle, read=known.words[: len(boxes)])
        self._take(posted, self._agent.transfer)
        return posted

    def words(self, posted: PostedTransfer) -> Sequence[int]:
        assert posted.read is not None
        words: list[int] = posted.read.tolist()
        return words

    def state(self, posted: PostedTransfer) -> WriteState:
        if posted.state == "PROC":
            self._take(posted, self._agent.check_xfer_state)
        if posted.state == "PROC":
            return WriteState.POSTED
        if posted.state != "DONE" and time.monotonic() - posted.failed_at < SETTLE_S:
            return WriteState.POSTED
        try:
            posted.handle.release()
        except Exception:
            # It says that parts of it are still active, and has freed nothing: ask again.
            return WriteState.POSTED
        return WriteState.LANDED if posted.state == "DONE" else WriteState.BROKEN

    def error(self, posted: PostedTransfer) -> str:
        return posted.error

    def notifications(self) -> list[bytes]:
        by_agent: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return [payload for payloads in by_agent.values() for payload in payloads]

    def close(self) -> None:
        """Destroy the agent, and with it every connection and whatever still runs on one."""
        self._remote.clear()
        self._registered += [boxes.registered for boxes in self._boxes.values()]
        self._boxes.clear()
        self._local = None
        for registered in self._registered:
            try:
                self._agent.deregister_memory(registered)
            except Exception as error:
                log.warning("could not deregister the pool: %s", describe(error))
        self._registered.clear()
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
        return self._agent.prep_xfer_dlist(name, page_rows(memory), memory.kind)

    def _register_words(self, words: Words) -> Any:
        return self._agent.register_memory([(words.ctypes.data, words.nbytes, 0, "")], "DRAM")

    def _describe_boxes(self, name: str, stage: StageArea) -> RemoteBoxes:
        words: Words = np.zeros(LOOK_BOXES, dtype=np.uint64)
        there = word_rows(stage.boxes_address, stage.num_boxes)
        here = word_rows(words.ctypes.data, len(words))
        registered = self._register_words(words)
        return RemoteBoxes(
            self._agent.prep_xfer_dlist(name, there, "DRAM"),
            words,
            self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM"),
            registered,
        )

    def _some_heads(self, memory: PeerMemory, write: Write) -> Any:
        """A transfer of the heads that both pools have, described for these pages alone."""
        here, there = common_rows(
            self._memory, memory, self._num_layers, write.source_pages, write.target_pages
        )
        local = self._agent.get_xfer_descs(here, self._memory.kind)
        remote = self._agent.get_xfer_descs(there, memory.kind)
        return self._agent.initialize_xfer(
            "WRITE", local, remote, memory.agent_name, write.notification
        )

    def _forget_agent(self, name: str) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            log.debug("nothing of agent %s to drop: %s", name, describe(error))


class NixlTransfer(ThreadedTransfer[PostedTransfer]):
    """A `TransferBackend` over NIXL.

    The pool (`num_pages` pages of `page_bytes` from `pool_address`, laid out as `transfer.layout`
    says, with KV heads `first_head`, ... of the model's) is registered once and must outlive
    `close`. `backend_params` go to NIXL's UCX backend; `UCX_*` variables of the environment
    are read when this is constructed. `kind` is DRAM or VRAM. `clock` judges leases.

    On a GPU `fence` tells when pages are computed. With `stage` the pool is not registered; pages
    go through the stage's host memory, which must outlive `close` as well. `prepare_thread` is
    called first of all on the thread that all of it runs on.

    Raises what NIXL raises when the agent or the registration fails.
    """

    def __init__(
        self,
        pool_address: int,
        num_pages: int,
        page_bytes: int,
        incarnation: Incarnation,
        backend_params: dict[str, str],
        *,
        num_layers: int,
        first_head: int,
        num_heads: int,
        kind: str = "DRAM",
        device_id: int = 0,
        clock: Callable[[], float] = time.monotonic,
        pacing: Pacing | None = None,
        fence: Fence | None = None,
        stage: PageStage | None = None,
        prepare_thread: Callable[[], None] = nothing,
    ) -> None:
        boxes = None if stage is None else Boxes(num_pages, num_heads)
        memory = PeerMemory(
            agent_name=f"pdserve-{incarnation}",
            metadata=b"",
            base_address=pool_address,
            num_pages=num_pages,
            page_bytes=page_bytes,
            first_head=first_head,
            num_heads=num_heads,
            device_id=device_id,
            kind=kind,
            stage=stage_area(stage, boxes),
        )
        check_layout(memory, num_layers)
        agent = NixlAgent(inner_memory(memory), num_layers, backend_params, boxes)
        super().__init__(
            agent,
            msgspec.structs.replace(memory, metadata=seal(agent.metadata())),
            clock,
            pacing or Pacing(),
            fence=fence,
            stage=stage,
            boxes=boxes,
            prepare_thread=prepare_thread,
        )
