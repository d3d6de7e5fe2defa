"""How a node leaves. Pure.

    asked ─▶ takes nothing new; what holds no KV goes back to its router at once
          ─▶ what holds KV finishes here; after `drain_s` it goes back too. A paused node finishes
             nothing, so there everything goes back at once
          ─▶ its own posted writes end, and so do its peers' writes into it
          ─▶ ends, having told peers and routers           or, past the bound: ends all the same

"Goes back" is a retraction: the router replays it elsewhere, free of charge.
"""

from collections.abc import Iterable

from common.lifecycle import R
from common.messages import NodeState

DRAIN_GRACE_S = 2.0
"""Beyond `drain_s` and the longest post, for what was handed over last to come to rest."""


class Leave:
    """Whether and how this node is leaving. Times are the node's clock."""

    def __init__(self, drain_s: float, longest_post_s: float) -> None:
        self._drain_s = drain_s
        self._rest_s = longest_post_s + DRAIN_GRACE_S
        self._hand_over_at = float("inf")
        self._give_up_at = float("inf")
        self.under_way = False

    def begin(self, now: float) -> None:
        """Finish or hand over what is here, then end. Repeated calls change nothing."""
        if not self.under_way:
            self.under_way = True
            self._hand_over_at = now + self._drain_s
            self._give_up_at = self._hand_over_at + self._rest_s

    def force(self, now: float) -> None:
        """Hand everything over and end at once, whatever is still under way."""
        self.under_way = True
        self._hand_over_at = self._give_up_at = now

    def state(self, *, paused: bool) -> NodeState:
        if self.under_way:
            return NodeState.DRAINING
        return NodeState.PAUSED if paused else NodeState.READY

    def to_hand_over(self, reqs: Iterable[R], now: float, *, paused: bool) -> list[R]:
        """Those of `reqs` that this node will not finish."""
        if not self.under_way:
            return []
        everything = paused or now >= self._hand_over_at
        return [req for req in reqs if everything or not req.pages]

    def may_end(self, now: float, *, is_empty: bool) -> bool:
        """Whether the node has drained, or may not wait any longer."""
        return self.under_way and (is_empty or now >= self._give_up_at)
