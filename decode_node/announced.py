"""The prefill nodes that routers have announced: dialled before a request needs them. Pure."""

from collections.abc import Callable, Sequence

from common.messages import Incarnation, PeerNode
from decode_node.peers import PrefillLinks


class AnnouncedPeers:
    """One list for each router; the newest replaces the one before."""

    def __init__(self, links: PrefillLinks, every_s: float) -> None:
        """`every_s`: between two looks at whether a link must be dialled again."""
        self._links = links
        self._every_s = every_s
        self._lists: dict[Incarnation, dict[Incarnation, str]] = {}
        self._departed: set[Incarnation] = set()
        self._next_look = 0.0

    def announce(self, router: Incarnation, nodes: Sequence[PeerNode] | None) -> None:
        """All nodes that `router` names. None: it is lost, but its nodes are not; links to them
        stay for whoever names them next, and are not dialled again meanwhile."""
        before = self._lists.pop(router, {})
        if nodes is not None:
            self._lists[router] = {node.incarnation: node.address for node in nodes}
            self._departed |= set(before)
        self._departed -= set(self._all())
        self._next_look = 0.0

    def tend(self, now: float, is_needed: Callable[[Incarnation], bool]) -> None:
        """Dial who is named; hang up on who no longer is, unless a room still needs the link."""
        if now >= self._next_look:
            self._next_look = now + self._every_s
            for peer, address in self._all().items():
                self._links.want(peer, address)
        for peer in [p for p in self._departed if not is_needed(p)]:
            self._departed.discard(peer)
            self._links.close(peer)

    def _all(self) -> dict[Incarnation, str]:
        return {peer: address for one in self._lists.values() for peer, address in one.items()}
