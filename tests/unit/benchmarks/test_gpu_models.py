"""Checkpoints that the GPU benchmark makes for itself."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_cells import serving
from benchmarks.gpu_cells.counts import layer_weights, model_weights
from benchmarks.gpu_cells.random_checkpoint import SPARE, fitting, write_checkpoint
from benchmarks.gpu_cells.scale import (
    DRY,
    DRY_RATES,
    Setting,
    llama_8b_shape,
    tiny_shape,
    with_layers,
)
from benchmarks.gpu_cells.steps import fitting as fitting_the_card
from benchmarks.gpu_cells.stopwatch import ModelledStopwatch
from common.engine.loader import load_model
from deploy.errors import StartupError

Usage = namedtuple("Usage", ["total", "used", "free"])


def setting(scratch: Path, model: str = "random") -> Setting:
    return Setting(
        scale=DRY,
        device=torch.device("cpu"),
        dtype=torch.float32,
        stopwatch=ModelledStopwatch(DRY_RATES),
        rates=None,
        scratch=str(scratch),
        model=model,
    )


def test_a_written_checkpoint_is_the_model_that_was_asked_for(tmp_path: Path) -> None:
    spec = tiny_shape()
    size = write_checkpoint(spec, torch.bfloat16, tmp_path, "cpu")
    assert size == 2 * model_weights(spec)
    loaded = load_model(tmp_path)
    assert loaded.dtype is torch.bfloat16
    assert (loaded.spec.num_layers, loaded.spec.num_kv_heads) == (2, 2)
    assert loaded.spec.vocab_size == spec.vocab_size
    assert loaded.spec.rope_parameters == spec.rope_parameters


def test_equal_seeds_make_equal_checkpoints(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_checkpoint(tiny_shape(), torch.float32, tmp_path / name, "cpu", seed=5)
    for file in (tmp_path / "a").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_a_small_disk_gets_fewer_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = with_layers(llama_8b_shape(), 8)
    fixed = model_weights(spec) - 8 * layer_weights(spec)

    def free_for(layers: float) -> None:
        free = 2 * (fixed + layers * layer_weights(spec)) / SPARE + 1024
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free))

    free_for(100)
    assert fitting(spec, torch.bfloat16, tmp_path) == spec
    free_for(3.5)
    assert fitting(spec, torch.bfloat16, tmp_path).num_layers == 3
    free_for(0.5)
    with pytest.raises(OSError, match="no room for a single layer"):
        fitting(spec, torch.bfloat16, tmp_path)


def test_a_small_card_gets_fewer_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = setting(tmp_path)
    assert fitting_the_card(on_cpu, 3, 9) == on_cpu.scale.big
    card = Setting(**{field: getattr(on_cpu, field) for field in Setting.__slots__} | {
        "device": torch.device("cuda", 0)
    })  # fmt: skip
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 40))
    assert fitting_the_card(card, 3, 9) == card.scale.big
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 1 << 40))
    with pytest.raises(MemoryError, match="not one layer"):
        fitting_the_card(card, 3, 9)


def test_a_model_that_cannot_be_had_is_made_up_and_the_table_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(_name: str) -> Path:
        raise StartupError("no network")

    monkeypatch.setattr(serving, "resolve_model", nowhere)
    with serving.small_model(setting(tmp_path, model="some-model")) as model:
        assert (model.folder / "config.json").is_file()
        assert "no network" in model.described
    assert not model.folder.exists()

    monkeypatch.setattr(serving, "resolve_model", lambda _: tmp_path)
    with serving.small_model(setting(tmp_path, model="some-model")) as model:
        assert model == serving.Served(tmp_path, "some-model")


def test_the_large_model_is_cut_to_the_layers_that_are_served(tmp_path: Path) -> None:
    with serving.big_model(setting(tmp_path)) as model:
        assert model.spec is not None
        assert model.spec.num_layers == DRY.served_layers
        assert "2 of 2 layers" in model.described
