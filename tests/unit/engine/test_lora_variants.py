"""Adapters that PEFT itself wrote, and that are more, or other, than LoRA of the linear layers."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.engine.errors import AdapterError
from common.engine.lora.adapter import LoraAdapter
from common.engine.lora.reader import read_folder
from tests.adapters import AdapterSpec, make_adapter
from tests.unit.engine.conftest import Zoo

VARIANT = "llama"

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora is set"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
    ({"trainable_token_indices": [3, 4]}, "trainable_token_indices is set"),
    ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is set"),
    ({"layer_replication": [(0, 2), (1, 3)]}, "layer_replication is set"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
]
TELL_TALE_TENSORS = ("use_dora", "modules_to_save", "trainable_token_indices")


def read(zoo: Zoo, folder: Path) -> LoraAdapter:
    return read_folder(folder, zoo.loaded(VARIANT).spec, 256)


def make(zoo: Zoo, folder: Path, **settings: Any) -> Path:
    return make_adapter(zoo.folder(VARIANT), folder, AdapterSpec(rank=4, **settings))


@pytest.mark.parametrize(("more", "reason"), REFUSED, ids=[next(iter(m)) for m, _ in REFUSED])
def test_variants_are_refused_by_name(
    zoo: Zoo, tmp_path: Path, more: dict[str, Any], reason: str
) -> None:
    folder = make(zoo, tmp_path, targets=("q_proj", "up_proj"), more=more)
    with pytest.raises(AdapterError, match=f"^incompatible: {reason}"):
        read(zoo, folder)


@pytest.mark.parametrize("setting", TELL_TALE_TENSORS)
def test_the_tensors_tell_where_the_config_does_not(zoo: Zoo, tmp_path: Path, setting: str) -> None:
    more = next(more for more, _ in REFUSED if setting in more)
    folder = make(zoo, tmp_path, targets=("q_proj", "up_proj"), more=more)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {setting: None}))
    with pytest.raises(AdapterError, match=r"^incompatible: it holds "):
        read(zoo, folder)


def test_embeddings_are_refused_by_name(zoo: Zoo, tmp_path: Path) -> None:
    folder = make(zoo, tmp_path, targets=("q_proj", "embed_tokens"))
    with pytest.raises(AdapterError, match=r"it holds .*embed_tokens.*embeddings cannot be"):
        read(zoo, folder)


@pytest.mark.parametrize(
    ("targets", "sizes"),
    [("all-linear", [7, 7, 7]), (r".*layers\.[12]\..*(q|down)_proj", [0, 2, 2])],
)
def test_targets_named_in_any_way(zoo: Zoo, tmp_path: Path, targets: str, sizes: list[int]) -> None:
    assert [len(layer) for layer in read(zoo, make(zoo, tmp_path, targets=targets)).layers] == sizes
