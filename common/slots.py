"""Places in the model runner's page table, one for each request that computes."""

from collections.abc import Iterable

from common.request import Req


class SlotLeak(Exception):
    """Slots held and slots free do not add up: a bug."""


class Slots:
    """Hands out slot ids; a request holds at most one."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def give(self, req: Req) -> None:
        req.slot = self._free.pop()

    def take_back(self, req: Req) -> None:
        if req.slot is not None:
            self._free.append(req.slot)
            req.slot = None

    def check(self, reqs: Iterable[Req]) -> None:
        held = [req.slot for req in reqs if req.slot is not None]
        if sorted(held + self._free) != list(range(self._count)):
            raise SlotLeak(f"{sorted(held)} are held, {sorted(self._free)} are free")
