"""The parts of all ranks make the whole model, and each can be computed by itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from common.engine import loader
from common.engine.errors import UnsupportedModelError
from common.engine.parallel.group import Alone
from common.engine.parallel.shards import Cut, Shard, divide
from common.engine.spec import ModelSpec
from tests.lora_cases import SPEC
from tests.unit.engine.conftest import Zoo


class Part(Alone):
    """One of several ranks, which only loads."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


@st.composite
def shared_specs(draw: st.DrawFn) -> tuple[ModelSpec, int]:
    """A model and a number of ranks that can share it."""
    kv_heads, group = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    size = draw(st.integers(1, min(12, kv_heads * group)))
    spec = replace(
        SPEC,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        intermediate_size=draw(st.integers(size, 300)),
        vocab_size=draw(st.integers(1, 40)),
    )
    return spec, size


@settings(max_examples=150, deadline=None)
@given(shared_specs())
def test_all_ranks_make_the_whole(case: tuple[ModelSpec, int]) -> None:
    spec, size = case
    shards = [Shard.of(spec, rank, size) for rank in range(size)]
    for ranges, count in (
        ([shard.heads for shard in shards], spec.num_heads),
        ([shard.inner for shard in shards], spec.intermediate_size),
        ([shard.vocab for shard in shards], spec.vocab_size),
    ):
        assert [entry for part in ranges for entry in part] == list(range(count))
    owners = [sum(head in shard.kv_heads for shard in shards) for head in range(spec.num_kv_heads)]
    if size <= spec.num_kv_heads:
        assert owners == [1] * spec.num_kv_heads
    else:
        assert all(len(shard.kv_heads) == 1 for shard in shards)
        assert max(owners) - min(owners) <= 1
        assert min(owners) >= 1
    piece = -(-spec.vocab_size // size)
    for rank, shard in enumerate(shards):
        assert all(len(part) > 0 for part in (shard.heads, shard.kv_heads, shard.inner))
        assert shard.vocab.start == min(rank * piece, spec.vocab_size)


@settings(max_examples=150, deadline=None)
@given(shared_specs())
def test_each_query_head_finds_its_kv_head_at_the_place_that_the_local_spec_says(
    case: tuple[ModelSpec, int],
) -> None:
    spec, size = case
    for rank in range(size):
        shard = Shard.of(spec, rank, size)
        local = shard.local
        assert (local.num_heads, local.num_kv_heads) == (len(shard.heads), len(shard.kv_heads))
        for place, head in enumerate(shard.heads):
            kv_head = head // (spec.num_heads // spec.num_kv_heads)
            local_kv = place // (local.num_heads // local.num_kv_heads)
            assert shard.kv_heads[local_kv] == kv_head


@given(st.integers(0, 100), st.integers(1, 20))
def test_a_division_is_even(count: int, parts: int) -> None:
    lengths = [len(part) for part in divide(count, parts)]
    assert sum(lengths) == count
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_smollm2_on_two_ranks() -> None:
    spec = replace(SPEC, num_heads=9, num_kv_heads=3, intermediate_size=1536, vocab_size=49152)
    first, second = Shard.of(spec, 0, 2), Shard.of(spec, 1, 2)
    assert (first.heads, first.kv_heads) == (range(6), range(2))
    assert (second.heads, second.kv_heads) == (range(6, 9), range(2, 3))
    assert (first.inner, second.inner) == (range(768), range(768, 1536))


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="4 attention heads cannot be divided among 5"):
        Shard.of(SPEC, 0, 5)
    with pytest.raises(UnsupportedModelError, match=r"3 rows of the MLP .* among 4"):
        Shard.of(replace(SPEC, intermediate_size=3), 0, 4)


# ---------------------------------------------------------------- what is read of a checkpoint


class Watched:
    """A stored tensor that remembers how much of it was read."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self.read = 0

    def get_shape(self) -> list[int]:
        shape: list[int] = self._stored.get_shape()
        return shape

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        found: Tensor = self._stored[index]
        self.read += found.numel()
        return found


@pytest.mark.parametrize(
    ("variant", "size"),
    [("llama-biases", 2), ("llama-biases", 4), ("qwen2", 5), ("qwen3", 3), ("smollm2", 2)],
)
def test_every_weight_is_loaded_once_or_by_all(
    zoo: Zoo, variant: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every entry of a checkpoint is in the rank's part that it belongs to, and nothing more of the
    file is read than what is kept."""
    folder, spec = zoo.folder(variant), zoo.loaded(variant).spec
    whole = load_file(folder / "model.safetensors")
    filled = {name: torch.zeros_like(value) for name, value in whole.items()}
    holders = {name: torch.zeros_like(value) for name, value in whole.items()}
    copy = loader._copy

    def watched(name: str, place: Tensor, stored: loader.Stored, cut: Cut | None) -> None:
        watching = Watched(stored)
        copy(name, place, watching, cut)
        index = (slice(None),) if cut is None else cut.index
        part = place[0] if "q_norm" in name or "k_norm" in name else place
        assert watching.read == part.numel()
        filled[name][index] = part
        holders[name][index] += 1

    monkeypatch.setattr(loader, "_copy", watched)
    for rank in range(size):
        loader.load_model(folder, "float32", group=Part(rank, size))
    for name, value in whole.items():
        assert torch.equal(filled[name], value), name
        found = set(holders[name].view(-1).tolist())
        if is_cut(name) and not ("k_proj" in name or "v_proj" in name):
            assert found == {1.0}, name
        elif is_cut(name):
            replicas = range(size // spec.num_kv_heads, -(-size // spec.num_kv_heads) + 1)
            assert found <= {float(max(1, count)) for count in replicas}, name
        else:
            assert found == {float(size)}, name


def is_cut(name: str) -> bool:
    if name.endswith("bias"):
        return "o_proj" not in name and "down_proj" not in name
    return "proj" in name or name == "lm_head.weight"


def test_ranks_agree_on_the_digest_with_one_that_is_alone(zoo: Zoo) -> None:
    folder: Path = zoo.folder("llama")
    digests = {loader.load_model(folder, group=Part(rank, 2)).digest for rank in range(2)}
    assert digests == {zoo.loaded("llama").digest}
