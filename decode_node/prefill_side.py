"""What prefill nodes say to a decode node, and what becomes of the rooms it concerns. Pure.

Every word belongs to a link (`PrefillLinks`); what an older link says does not count. A room whose
KV is arriving ends on prefill's word, or with the link: then its pages are set aside
(`Quarantine`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import assert_never, cast

from common.events import FromPeer, PeerClosed, PeerProbed
from common.kv_cache.manager import KVCacheManager
from common.ledger import Ledger
from common.lifecycle import ReqQueue, State
from common.messages import (
    Drained,
    FailureKind,
    Incarnation,
    PeerBye,
    PeerRefused,
    PeerWelcome,
    Ping,
    Room,
    RoomFailed,
    RoomFinished,
    RoomUnknown,
    ToDecode,
)
from common.settings import SchedulerSettings
from common.tombstones import Ending, Tombstone, Tombstones
from decode_node.peers import PrefillLinks
from decode_node.quarantine import Quarantine
from decode_node.request import DecodeReq
from decode_node.sync import sync_with
from transfer.handshake import mismatch

LAST_WORDS_S = 0.5
"""How long notifications of writes that have ended may still be on their way."""

Fail = Callable[[DecodeReq, FailureKind, str], None]
Retire = Callable[[DecodeReq, Tombstone], None]


class PrefillSide:
    """Acts on the words and the silence of prefill nodes. Owns no request and no page."""

    def __init__(
        self,
        settings: SchedulerSettings,
        kv: KVCacheManager,
        links: PrefillLinks,
        quarantine: Quarantine,
        queues: Mapping[State, ReqQueue[DecodeReq]],
        reqs: Mapping[Room, DecodeReq],
        tombstones: Tombstones,
        ledger: Ledger,
        *,
        fail: Fail,
        retire: Retire,
    ) -> None:
        """`fail` ends a request with an answer to its router; `retire` is its last act."""
        self._settings = settings
        self._kv = kv
        self._links = links
        self._quarantine = quarantine
        self._prealloc = queues[State.PREALLOC]
        self._transfer = queues[State.TRANSFER]
        self._aborting = queues[State.ABORTING]
        self._reqs = reqs
        self._tombstones = tombstones
        self._ledger = ledger
        self._fail = fail
        self._retire = retire

    @property
    def _counters(self) -> "Counter[str]":
        return self._ledger.counters

    # ------------------------------------------------------------ rooms

    def room_of(self, room: Room, peer: Incarnation) -> DecodeReq | None:
        """The request whose KV `peer` makes in this room."""
        req = self._reqs.get(room)
        return req if req is not None and req.prefill == peer else None

    def is_held_up(self, req: DecodeReq) -> bool:
        """Its KV comes only when prefill is no longer paused."""
        return req in self._transfer and self._links.paused(req.prefill)

    def is_needed(self, peer: Incarnation) -> bool:
        """Whether a room, or pages that are set aside, wait for a word of `peer`."""
        used = any(req.prefill == peer for req in self._reqs.values())
        return used or bool(self._kv.quarantined_rooms(peer))

    def send_destination(self, req: DecodeReq) -> None:
        """Name its pages to prefill, perhaps again."""
        self._links.send(req.prefill, req.destination(self._settings.weight_version))

    def sync(self, now: float) -> None:
        """Ask for what was lost on the way, where it is time to."""
        queues = self._transfer, self._aborting, self._prealloc
        for peer in self._links.due_for_sync(now, self._settings.sync_s):
            sync = sync_with(peer, *queues, self._kv.quarantined_rooms(peer))
            if sync is not None:
                self._links.send(peer, sync)

    def set_aside(self, req: DecodeReq) -> None:
        """Its prefill is silent and may still write: nobody gets its pages for now."""
        self._quarantine.set_aside(req, req.prefill, req.prefill_address)
        self._retire(req, Tombstone(Ending.FAILED, message="prefill went silent"))

    # ------------------------------------------------------------ messages

    def on_event(self, event: FromPeer | PeerClosed | PeerProbed, now: float) -> None:
        match event:
            case FromPeer(peer, link, body):
                if self._links.is_current(peer, link):
                    self._on_message(peer, cast(ToDecode, body), now)
                else:
                    self._counters["stale_messages"] += 1
            case PeerClosed():
                self._on_closed(event, now)
            case PeerProbed(peer, reach):
                self._quarantine.on_probed(peer, reach, now)
            case _:
                assert_never(event)

    def _on_message(self, peer: Incarnation, message: ToDecode, now: float) -> None:
        match message:
            case PeerWelcome(fingerprint=fingerprint):
                problem = mismatch(self._settings.fingerprint, fingerprint)
                if problem is not None:
                    self.on_lost(peer, problem, now)
                else:
                    self._links.on_welcome(peer)
                    self._quarantine.on_welcome(peer)
            case PeerRefused(reason=reason):
                self.on_lost(peer, reason, now)
            case Ping(_, paused):
                pause_s = self._links.on_ping(peer, paused, now)
                for req in self._transfer:
                    req.deadline += pause_s if req.prefill == peer else 0.0
            case RoomUnknown(room):
                unknown = self.room_of(room, peer)
                if unknown is not None and unknown in self._transfer:
                    self.send_destination(unknown)
            case RoomFinished(room):
                self._on_room_over(room, peer, None, ())
            case RoomFailed(room=room, kind=kind, message=why, landed=landed):
                self._on_room_over(room, peer, (kind, why), landed)
            case Drained(room=room, landed=landed):
                given_up = (FailureKind.TRANSFER, "prefill gave the room up")
                self._on_room_over(room, peer, given_up, landed)
            case PeerBye():
                self._on_left(peer, now)
            case _:
                assert_never(message)

    def _on_room_over(
        self,
        room: Room,
        peer: Incarnation,
        failure: tuple[FailureKind, str] | None,
        landed: Iterable[int],
    ) -> None:
        """Prefill's word that it will not touch this room's pages any more."""
        req = self.room_of(room, peer)
        if req is None:
            if self._quarantine.drained(room, peer):
                self._tombstones.with_landed(room, landed)
            return
        if req in self._aborting:
            self._retire(req, Tombstone(Ending.FAILED, frozenset(landed)))
        elif req in self._transfer and failure is not None:
            req.landed.update(landed)
            req.drained = True
            self._fail(req, *failure)
        elif req in self._transfer:
            self._ledger.ended(req, "finished by its first token")
            self._retire(req, Tombstone(Ending.DONE, frozenset(req.landed)))

    # ------------------------------------------------------------ links that end

    def on_lost(self, peer: Incarnation, why: str, now: float) -> None:
        """Hang up. The quarantine of what is set aside has no end before the link is closed."""
        self._quarantine.ask_now(peer, now)
        if self._links.close(peer):
            self._give_up_rooms(peer, why)

    def _on_closed(self, event: PeerClosed, now: float) -> None:
        peer = event.peer
        current = self._links.is_current(peer, event.link)
        if not self._links.on_closed(peer, event.link):
            self._counters["stale_messages"] += 1
            return
        if current:
            self._give_up_rooms(peer, event.why)
        self._quarantine.on_closed(peer, now, silent_s=event.silent_s, gone=event.gone)
        if not any(req.prefill == peer for req in self._transfer):
            # One that left by its own word has ended all its writes, so their last pieces come yet.
            self._links.forget_pieces(peer)

    def _give_up_rooms(self, peer: Incarnation, why: str) -> None:
        """Nothing more will be heard on this link: what waits on it fails, pages are set aside."""
        self._counters["peers_lost"] += 1
        for req in [req for req in self._reqs.values() if req.prefill == peer]:
            if req in self._aborting:
                self.set_aside(req)
            elif req in self._prealloc or req in self._transfer:
                self._fail(req, FailureKind.PEER_LOST, why)

    def _on_left(self, peer: Incarnation, now: float) -> None:
        """Prefill's own word that all its writes have ended: nothing has to be set aside."""
        if not self._links.close(peer):
            return
        for room in self._kv.quarantined_rooms(peer):
            self._quarantine.drained(room, peer)
        for req in [req for req in self._reqs.values() if req.prefill == peer]:
            if req in self._prealloc:
                self._fail(req, FailureKind.PEER_LOST, "prefill has left")
            elif req in self._aborting:
                self._retire(req, Tombstone(Ending.FAILED, message="prefill has left"))
            elif req in self._transfer:
                req.drained = True
                req.deadline = min(req.deadline, now + LAST_WORDS_S)
