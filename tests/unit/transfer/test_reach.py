"""Whether pages can be moved is found out by moving one."""

from collections.abc import Callable

import numpy as np
import pytest

from common.messages import PeerMemory
from transfer.nixl import NixlAgent
from transfer.reach import reach_problem

NUM_PAGES, PAGE_BYTES = 4, 4096


def described(pool: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> PeerMemory:
    return PeerMemory(
        agent_name="pdserve-try",
        metadata=b"",
        base_address=pool.ctypes.data,
        num_pages=NUM_PAGES,
        page_bytes=PAGE_BYTES,
        first_head=0,
        num_heads=1,
    )


def test_a_page_is_moved_and_no_other() -> None:
    pool = np.random.default_rng(1).integers(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=np.uint8)
    before = pool.copy()
    assert reach_problem(described(pool), lambda memory: NixlAgent(memory, 1, {})) is None
    assert (pool[1] == before[0]).all()
    assert (pool[[0, 2, 3]] == before[[0, 2, 3]]).all()


def test_memory_that_cannot_be_registered_is_a_problem() -> None:
    pool = np.zeros((NUM_PAGES, PAGE_BYTES), dtype=np.uint8)

    def refuse(memory: PeerMemory) -> NixlAgent:
        raise RuntimeError("planted: no such memory")

    assert reach_problem(described(pool), refuse) == "RuntimeError: planted: no such memory"


@pytest.mark.parametrize("how", ["raises", "never"])
def test_a_copy_that_fails_or_hangs_is_a_problem(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr("transfer.reach.TRY_S", 0.2)
    pool = np.zeros((NUM_PAGES, PAGE_BYTES), dtype=np.uint8)

    class Broken(NixlAgent):
        def post(self, *args: object) -> object:  # type: ignore[override]
            if how == "raises":
                raise RuntimeError("planted: unsupported")
            return super().post(*args)  # type: ignore[arg-type]

        def notifications(self) -> list[bytes]:
            return []

    make: Callable[[PeerMemory], NixlAgent] = lambda memory: Broken(memory, 1, {})  # noqa: E731
    problem = reach_problem(described(pool), make)
    assert problem is not None
    assert ("planted: unsupported" if how == "raises" else "within 0.2 s") in problem
