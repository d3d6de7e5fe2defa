"""What all nodes together allow, worked out once for each change among them. Pure.

A request asks these questions several times, and must not pay for the number of nodes: a `Fleet` is
made when a node joins, leaves, or changes in what it can do, and keeps its answers. Loads, which
change all the time, are not here.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

from common.messages import Adapter, Fingerprint
from common.modes import DisaggregationMode
from router.node import Node
from router.page_keys import Lineage

_Answer = TypeVar("_Answer")


class Fleet:
    """All nodes as they were when it was made."""

    def __init__(self, nodes: Sequence[Node], *, decode_alone: bool) -> None:
        self._nodes = nodes
        self._decode_alone = decode_alone
        self._by_role = {
            role: tuple(node for node in nodes if node.role is role) for role in DisaggregationMode
        }
        self._prefills = self._by_role[DisaggregationMode.PREFILL]
        self._decodes = self._by_role[DisaggregationMode.DECODE]
        self._answers: dict[tuple[str, Adapter | None], object] = {}

    def of_role(self, role: DisaggregationMode) -> tuple[Node, ...]:
        return self._by_role[role]

    # ------------------------------------------------------------ bounds

    def max_model_len(self, otherwise: int) -> int:
        """Longest prompt plus output that every node takes."""
        return otherwise if self._shortest_model_len is None else self._shortest_model_len

    @cached_property
    def _shortest_model_len(self) -> int | None:
        return min((n.hello.max_model_len for n in self._nodes), default=None)

    @cached_property
    def decode_tokens(self) -> int:
        """Tokens of KV that all decode nodes hold together, paused or not."""
        return sum(node.capacity_tokens for node in self._decodes if node.stays)

    @cached_property
    def num_computing(self) -> int:
        """Nodes that compute prompts, now or after a pause: prefill's, or decode's where there is
        none."""
        prefills = sum(node.stays for node in self._prefills)
        if prefills or not self._decode_alone:
            return prefills
        return sum(node.stays for node in self._decodes)

    def capacity_tokens(self, adapter: Adapter | None = None) -> int | None:
        """Most tokens of KV that some pair with an adapter can hold, or a decode node that may work
        alone, paused or not; None if there is neither."""
        return self._once("capacity", adapter, self._capacity_tokens)

    def _capacity_tokens(self, adapter: Adapter | None) -> int | None:
        prefill = _largest(self._prefills, adapter)
        decode = _largest(self._decodes, adapter)
        found = [min(prefill[group], decode[group]) for group in prefill.keys() & decode.keys()]
        if self._decode_alone:
            served = self.prefill_groups(adapter)
            found += [tokens for group, tokens in decode.items() if group not in served]
        return max(found, default=None)

    def prefill_groups(self, adapter: Adapter | None) -> set[Fingerprint]:
        """The kinds of pages that some prefill node makes, or will after a pause. Decode nodes of
        other kinds have to work alone."""
        return self._once("groups", adapter, self._prefill_groups)

    def _prefill_groups(self, adapter: Adapter | None) -> set[Fingerprint]:
        return {
            node.hello.fingerprint
            for node in self._prefills
            if node.stays and node.is_equipped and node.holds(adapter)
        }

    @cached_property
    def lineages(self) -> tuple[Lineage, ...]:
        """What the nodes' pages are computed by."""
        hellos = [node.hello for node in self._nodes]
        found = dict.fromkeys(Lineage(h.fingerprint, h.weight_version) for h in hellos)
        return tuple(found)

    # ------------------------------------------------------------ what is missing

    def missing(self, adapter: Adapter | None = None) -> str | None:
        """Why nobody can work with an adapter, also after a pause; None if a pair of nodes can, or
        a decode node alone."""
        return self._once("missing", adapter, self._missing)

    def _missing(self, adapter: Adapter | None) -> str | None:
        if self.capacity_tokens(adapter) is not None:
            return None
        for role in DisaggregationMode:
            staying = [node for node in self.of_role(role) if node.stays]
            if not staying:
                return f"no {role} node is available"
            if adapter is not None and not any(node.holds(adapter) for node in staying):
                return f"no {role} node that is left has adapter {adapter.name!r}"
        return "no prefill node fits a decode node: " + "; ".join(self.mismatches)

    @cached_property
    def is_equipping(self) -> bool:
        """Whether a node may soon have adapters that it has not now."""
        return any(node.stays and not node.is_equipped for node in self._nodes)

    @cached_property
    def mismatches(self) -> list[str]:
        """In which fields prefill and decode nodes that cannot work together differ."""
        found = []
        for prefill in self._prefills:
            for decode in self._decodes:
                differing = _differing(prefill.hello.fingerprint, decode.hello.fingerprint)
                if differing:
                    names = f"{prefill.hello.name} and {decode.hello.name}"
                    found.append(f"{names} differ in {', '.join(differing)}")
        return found

    def _once(
        self, question: str, adapter: Adapter | None, find: Callable[[Adapter | None], _Answer]
    ) -> _Answer:
        """The answer for an adapter, found at most once."""
        asked = (question, adapter)
        if asked not in self._answers:
            self._answers[asked] = find(adapter)
        answer: _Answer = self._answers[asked]  # type: ignore[assignment]
        return answer


def _largest(nodes: Sequence[Node], adapter: Adapter | None) -> dict[Fingerprint, int]:
    """The largest pool of the nodes that stay, for each kind of page."""
    largest: dict[Fingerprint, int] = {}
    for node in nodes:
        if node.stays and node.holds(adapter):
            group = node.hello.fingerprint
            largest[group] = max(largest.get(group, 0), node.capacity_tokens)
    return largest


def _differing(left: Fingerprint, right: Fingerprint) -> list[str]:
    if left == right:
        return []
    return [
        field for field in left.__struct_fields__ if getattr(left, field) != getattr(right, field)
    ]
