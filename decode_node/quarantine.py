"""Pages that a lost prefill node may still write into: set aside until there is proof.

    link closed ─▶ probe ─┬─ gone ──────────▶ settle ─────────────────────────────▶ free
                    ▲     ├─ listening ───┐
                    │     └─ unreachable ─┴▶ dial ─▶ welcome ─▶ Sync ─▶ Drained ──▶ free
                    └──────── back-off ───┘

A clock alone proves nothing. Prefill looks at its lease before each post, but it can be stopped
between the look and the post, or in the middle of a write whose rest leaves when it goes on; and a
network that heals delivers what it held back. So pages come home by one of these:

* prefill's own word that the room's writes have ended, on whatever link (`drained`): a lost peer is
  dialled again for it, also when no request wants it;
* the end of its process, and then a moment for what is still in our own buffers. After an outage
  that moment is as long as the outage was: a sender's kernel repeats a segment after twice the time
  that it waited before, also when its process has died meanwhile;
* the last resort: it was not heard for `stopped_peer_s` although its kernel takes connections, or
  for `unproven_s` and nobody answers. Such pages are given away last, and counted.

No such clock runs before the I/O thread has closed the link, for until then it may echo pings and
so renew the lease.
"""

from collections import Counter
from dataclasses import dataclass

from common.events import Reach
from common.kv_cache.manager import KVCacheManager
from common.messages import Incarnation, Room
from common.outbox import Outbox
from common.request import Req
from common.settings import SchedulerSettings
from decode_node.peers import PrefillLinks

SETTLE_S = 1.0
"""From the proof that a process has ended until what it had sent is certainly taken in."""
RETRY_S = 1.0
"""From the first probe to the second; doubled each time, up to `LONGEST_RETRY_S`."""
LONGEST_RETRY_S = 10.0


@dataclass(slots=True)
class Suspect:
    """A lost prefill incarnation that pages are set aside for."""

    address: str
    heard_at: float | None = None
    """When it was last heard; None while its link is open: no clock runs then."""
    seen_at: float = 0.0
    """When it, or at least its kernel, last gave a sign of life."""
    reach: Reach | None = None
    free_at: float | None = None
    """Set once the process is known to have ended."""
    probing: bool = False
    try_at: float = 0.0
    wait_s: float = RETRY_S
    """From this probe to the next."""


class Quarantine:
    """Decides when pages that were set aside may be given to others. Pure; owns no page itself."""

    def __init__(
        self,
        kv: KVCacheManager,
        links: PrefillLinks,
        outbox: Outbox,
        counters: "Counter[str]",
        settings: SchedulerSettings,
    ) -> None:
        self._kv = kv
        self._links = links
        self._outbox = outbox
        self._counters = counters
        self._unproven_s = settings.unproven_s
        self._stopped_s = settings.stopped_peer_s
        self._suspects: dict[Incarnation, Suspect] = {}

    @property
    def settling(self) -> bool:
        """Whether some peer has ended and its last bytes may be in our own buffers."""
        return any(suspect.free_at is not None for suspect in self._suspects.values())

    # ------------------------------------------------------------ facts

    def set_aside(self, req: Req, peer: Incarnation, address: str) -> None:
        """`req` is over, and `peer`, whose link is closing or closed, may write into its pages."""
        self._kv.quarantine(req, peer)
        if self._kv.quarantined_rooms(peer):
            self._suspects.setdefault(peer, Suspect(address))

    def on_closed(
        self, peer: Incarnation, now: float, *, silent_s: float | None, gone: bool
    ) -> None:
        """A link to `peer` is over; `silent_s` as in `PeerClosed`."""
        suspect = self._suspects.get(peer)
        if suspect is None:
            return
        if silent_s is not None or suspect.heard_at is None:
            suspect.heard_at = suspect.seen_at = now - (silent_s or 0.0)
            suspect.reach = suspect.free_at = None
        if gone:
            self._on_gone(suspect, now)

    def on_probed(self, peer: Incarnation, reach: Reach, now: float) -> None:
        suspect = self._suspects.get(peer)
        if suspect is None:
            return
        suspect.probing = False
        if suspect.free_at is not None:
            return
        if reach is Reach.GONE:
            self._on_gone(suspect, now)
            return
        suspect.reach = reach
        if reach is Reach.LISTENING:
            suspect.seen_at = now
        self._links.want(peer, suspect.address)

    def on_welcome(self, peer: Incarnation) -> None:
        """It lives: the next `Sync` asks for what was set aside, and no clock runs."""
        suspect = self._suspects.get(peer)
        if suspect is not None:
            suspect.heard_at = suspect.reach = suspect.free_at = None
            suspect.wait_s, suspect.try_at = RETRY_S, 0.0

    def ask_now(self, peer: Incarnation, now: float) -> None:
        """Somebody else has news of `peer`: do not wait for the next turn."""
        suspect = self._suspects.get(peer)
        if suspect is not None:
            suspect.try_at = min(suspect.try_at, now)

    def drained(self, room: Room, peer: Incarnation) -> bool:
        """`peer` says that it writes no more into this room; whether that brought pages home."""
        if not self._kv.end_quarantine(room, peer):
            return False
        self._counters["quarantine_drained"] += 1
        if not self._kv.quarantined_rooms(peer):
            del self._suspects[peer]
        return True

    def _on_gone(self, suspect: Suspect, now: float) -> None:
        suspect.free_at = now + max(SETTLE_S, now - suspect.seen_at)

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Free what may be freed, and probe whom it is time to probe."""
        for peer, suspect in list(self._suspects.items()):
            ending = self._ending(suspect, now)
            if ending is not None:
                rooms = self._kv.free_quarantine(peer, last=ending != "quarantine_gone")
                self._counters[ending] += rooms
                del self._suspects[peer]
            elif self._is_due(suspect, now):
                suspect.probing = True
                suspect.try_at = now + suspect.wait_s
                suspect.wait_s = min(2 * suspect.wait_s, LONGEST_RETRY_S)
                self._outbox.probe(peer, suspect.address)

    def _ending(self, suspect: Suspect, now: float) -> str | None:
        """The counter of what ends this quarantine now, or None."""
        if suspect.free_at is not None and suspect.free_at <= now:
            return "quarantine_gone"
        if suspect.heard_at is None:
            return None
        if suspect.reach is Reach.LISTENING and suspect.heard_at + self._stopped_s <= now:
            return "quarantine_stopped"
        if suspect.reach is Reach.UNREACHABLE and suspect.seen_at + self._unproven_s <= now:
            return "quarantine_expired"
        return None

    def _is_due(self, suspect: Suspect, now: float) -> bool:
        """Also while the peer is being dialled: what its kernel says is news all the same."""
        if suspect.probing or suspect.free_at is not None or suspect.heard_at is None:
            return False
        return suspect.try_at <= now

    def check_invariants(self) -> None:
        """Whoever pages are set aside for is watched, and nobody else."""
        if set(self._suspects) != self._kv.quarantined_peers():
            raise AssertionError("pages are set aside for peers that nobody watches")
