"""Fairness between adapters that want the same slots: pure decisions over plain numbers.

A slot whose adapter is in a steady stream of requests is never idle by itself. Once another adapter
has waited for `lora_drain_wait_s`, the slot closest to being free *drains* for it: its own adapter
goes on there, but takes only work that ends within what the slot was going to do anyway, counted
from the moment the drain began. That horizon only shrinks, so the slot is free after the longest
work it had then, and what was let in beside it.

Tokens stand for time: left to generate on a decode node, to compute on a prefill node.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Drain:
    """A slot is being emptied."""

    waiter: int
    """The adapter it is emptied for."""
    horizon: int
    """Tokens until the end of what was there when it began."""

    def admits(self, remaining: int, longest_computing: int) -> bool:
        """Whether work of `remaining` tokens, of the slot's own adapter, may still begin.

        `longest_computing`: the most that any request computing there has left; 0 if none does.
        Without one no step would move the horizon on, so nothing begins.
        """
        return remaining <= min(self.horizon, longest_computing)

    def on_step(self, tokens: int) -> None:
        """The node has computed a step of so many tokens for its longest row."""
        self.horizon -= tokens


def overdue(waits: Iterable[tuple[int, float]], now: float, after_s: float) -> list[int]:
    """Adapters that have waited for `after_s`, the longest-waiting first.

    `waits`: (adapter, since when its first request waits).
    """
    late = [(since, adapter) for adapter, since in waits if now - since >= after_s]
    return [adapter for _, adapter in sorted(late)]


def closest_to_free(slots: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """Of (slot, most tokens that a request there has left), the one with the least; else None."""
    return min(slots, key=lambda slot: (slot[1], slot[0]), default=None)
