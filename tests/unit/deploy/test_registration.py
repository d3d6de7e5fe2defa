"""When pages go through host memory, and what is said where that cannot be had."""

import logging
from dataclasses import dataclass

import pytest
import torch

from common.config import PrefillConfig
from common.engine.page_stage import PageStage
from common.kv_cache.storage import PagedKVCache
from deploy import registration
from deploy.errors import StartupError
from deploy.registration import _choose_stage, direct_problem, make_stage
from transfer.slots import LEAST_SLOTS


def pool(num_pages: int = 8) -> PagedKVCache:
    return PagedKVCache(
        num_pages=num_pages, num_layers=2, num_kv_heads=2, page_size=4, head_dim=8,
        dtype=torch.float32,
    )  # fmt: skip


@dataclass
class OnGpu(PagedKVCache):
    """A pool that says that it is a GPU's."""

    def __init__(self) -> None:
        super().__init__(
            num_pages=8, num_layers=1, num_kv_heads=1, page_size=4, head_dim=8,
            dtype=torch.float32,
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 1)


def config(staging: str, gib: float = 0.001) -> PrefillConfig:
    return PrefillConfig(transfer_staging=staging, staging_gib=gib)  # type: ignore[arg-type]


def test_host_memory_is_staged_only_if_told_to() -> None:
    assert _choose_stage(config("auto"), pool(), {}) is None
    assert _choose_stage(config("off"), pool(), {}) is None
    stage = _choose_stage(config("on"), pool(), {})
    assert stage is not None
    assert stage.num_slots == int(0.001 * (1 << 30)) // pool().page_bytes


@pytest.mark.parametrize("problem", [None, "no md supports it"])
def test_a_gpu_is_staged_if_it_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: str | None
) -> None:
    monkeypatch.setattr(registration, "direct_problem", lambda *_: problem)
    with caplog.at_level(logging.INFO):
        stage = _choose_stage(config("auto"), OnGpu(), {})
    assert (stage is None) == (problem is None)
    assert ("does not reach cuda:1" in caplog.text) == (problem is not None)
    assert _choose_stage(config("off"), OnGpu(), {}) is None


def test_a_ring_of_too_few_pages_is_refused() -> None:
    with pytest.raises(StartupError, match=f"hold 0 pages of .* at least {LEAST_SLOTS} are needed"):
        make_stage(config("on", gib=1e-9), pool())


def test_trying_leaves_the_pool_as_it_was() -> None:
    cache = pool()
    stage = PageStage(cache, 8)
    assert direct_problem(cache, stage, {}) is None
    assert not cache.tensor.any()
    assert not any(stage.buffer)


def test_wrong_bytes_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "reach_problem", lambda *_: None)
    cache = pool()
    assert direct_problem(cache, PageStage(cache, 8), {}) == "other bytes arrived than were sent"
    assert not cache.tensor.any()
    one = pool(1)
    assert direct_problem(one, PageStage(one, 8), {}) == "a pool of one page cannot be tried"
