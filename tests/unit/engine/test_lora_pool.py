"""The pool's memory: what it says it takes, and what it says where there is none."""

import pytest
import torch

from common.engine.errors import AdapterError
from common.engine.lora.pool import LoraPool
from tests.lora_cases import SPEC, adapter


def test_it_takes_what_it_says() -> None:
    pool = LoraPool(SPEC, torch.float32, 3, 20)
    said = pool.num_bytes
    assert not pool.layers, "nothing before it is needed"
    pool.make()
    assert pool.memory is not None
    assert pool.memory.numel() * pool.memory.itemsize == said
    views = [matrix for layer in pool.layers for product in layer for weights in product
             for matrix in (weights.shrink, weights.expand)]  # fmt: skip
    assert sum(view.numel() for view in views) * 4 == said
    assert {view.untyped_storage().data_ptr() for view in views} == {pool.memory.data_ptr()}


def test_adapters_find_the_memory_that_was_made_before() -> None:
    pool = LoraPool(SPEC, torch.float32, 3, 20)
    pool.make()
    made = pool.memory
    pool.place(1, adapter(5, [True] * 7), lambda: None)
    assert pool.memory is made


def test_a_gpu_without_room_is_an_adapters_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches whoever loads the adapter, with the numbers; the node goes on."""

    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "zeros", no_room)
    pool = LoraPool(SPEC, torch.float32, 3, 20, torch.device("meta"))
    with pytest.raises(AdapterError, match=f"{pool.num_bytes >> 20} MiB.*max_lora_rank"):
        pool.place(0, adapter(5, [True] * 7), lambda: None)


def test_a_placement_that_breaks_off_leaves_the_slot_empty() -> None:
    pool = LoraPool(SPEC, torch.float32, 3, 20)
    pool.place(0, adapter(5, [True] * 7), lambda: None)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.place(0, adapter(6, [True] * 7), stop)
    with pytest.raises(KeyError):
        pool.slot(0)
