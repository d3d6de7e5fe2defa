"""The queue of the router and the room on the nodes: who is let in, and who may start. Pure."""

from collections.abc import Iterator

from common.messages import Room
from router.admission import Admission, Backlog, Demand, Refusal
from router.cache_index import CacheIndex
from router.errors import unavailable
from router.limits import Limits
from router.load import BUSY_TOKENS, LoadBook
from router.nodes import NodeRegistry
from router.picking import Pair, Rules
from router.placement import Placement
from router.policies import Choose
from router.requests import Job
from router.waiting import WaitingRoom


class Intake:
    """Joins waiting room, load book, placement and admission."""

    def __init__(
        self,
        registry: NodeRegistry,
        limits: Limits,
        *,
        choose_prefill: Choose,
        choose_decode: Choose,
        cache: CacheIndex,
    ) -> None:
        self._registry = registry
        self.waiting = WaitingRoom()
        self.load = LoadBook()
        self.admission = Admission(limits.admission)
        self._placement = Placement(
            registry,
            self.load,
            cache,
            Rules(
                choose_prefill=choose_prefill,
                choose_decode=choose_decode,
                local=limits.local,
                decode_alone=registry.decode_alone,
                waits_for_cached=limits.waits_for_cached,
            ),
        )

    def check_room_for(self, demand: Demand, priority: int, unfinished: int, now: float) -> None:
        """Refuse a request where there is too much work, or where no node could ever take it.

        Raises:
            ApiError: 429 or 503.
        """
        missing = self._registry.fleet.missing()
        if missing is not None:
            self.admission.refused[Refusal.NO_NODE] += 1
            raise unavailable(missing)
        for adapter in demand.adapters if not self._registry.fleet.is_equipping else ():
            missing = self._registry.fleet.missing(adapter)
            if missing is not None:
                self.admission.refused[Refusal.NO_ADAPTER] += 1
                raise unavailable(missing, "adapter_unavailable")
        self.admission.check_count(unfinished, now, demand.choices)
        if not self.is_idle():
            self.admission.check_work(demand, self.backlog(priority), now)

    def is_idle(self) -> bool:
        """Nobody waits, and some pair of nodes takes a request at once."""
        return not self.waiting and self._placement.has_room(self._pace())

    def backlog(self, priority: int) -> Backlog:
        """What a new request of this priority would meet."""
        on_nodes = self._placement.tokens_to_prefill()
        return Backlog(
            tokens_ahead=on_nodes + self.waiting.tokens_ahead(priority),
            queued_tokens=on_nodes + self.waiting.tokens,
            held_tokens=self.load.held_tokens + self.waiting.held_tokens,
            decode_tokens=self._registry.fleet.decode_tokens,
            num_computing=self._placement.num_computing(),
        )

    def startable(self) -> Iterator[tuple[Job, Pair]]:
        """Waiting jobs for which there is room; each is started before the next is asked for."""
        return self._placement.round(self.waiting, self._pace())

    def note_work(self, *, running: bool, now: float) -> None:
        """Tell the meters whether there is enough to do. `running`: attempts are on nodes that
        are not paused."""
        enough = BUSY_TOKENS * self._placement.num_computing()
        busy = bool(self.waiting) or self._placement.tokens_to_prefill() >= enough
        self.admission.note_work(queued=running and busy, unfinished=running, now=now)

    def note_prefilled(self, room: Room, now: float) -> None:
        """A room's first token came."""
        done = self.load.computed(room)
        if done is not None:
            self.admission.note_prefilled(done.known, done.computed, now)

    def _pace(self) -> float:
        """Tokens per second of one node that computes prompts; 0 until it is known."""
        per_s = self.admission.computed_tokens_per_s or 0.0
        return per_s / max(1, self._placement.num_computing())
