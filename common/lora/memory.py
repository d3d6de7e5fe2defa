"""Which adapters' weights are in host memory: bounded, the least recently used leave. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Iterator


class HostMemory:
    """Numbers of adapters that are in host memory, or for which a place is kept while they are
    read; the least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, adapter: object) -> bool:
        return adapter in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    @property
    def is_full(self) -> bool:
        return len(self._held) >= self.capacity

    def hold(self, adapter: int) -> None:
        assert not self.is_full
        self._held[adapter] = None

    def touch(self, adapter: int) -> None:
        """It was used."""
        if adapter in self._held:
            self._held.move_to_end(adapter)

    def forget(self, adapter: int) -> bool:
        """Whether it was here."""
        if adapter not in self._held:
            return False
        del self._held[adapter]
        return True

    def oldest(self, may_go: Callable[[int], bool]) -> int | None:
        """The least recently used one that may go."""
        return next(filter(may_go, self._held), None)
