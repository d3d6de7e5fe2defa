"""Adapters are read as PEFT means them, and what cannot be served is refused with the reason."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.engine.errors import AdapterError
from common.engine.lora.adapter import LoraAdapter
from common.engine.lora.reader import fetch_adapter, find_adapter, read_folder
from tests.adapters import AdapterSpec, make_adapter
from tests.unit.engine.conftest import Zoo

VARIANT = "llama"
LAYER_0_Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def original(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    return make_adapter(zoo.folder(VARIANT), folder, AdapterSpec(rank=4, alpha=8))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "adapter"))


def read(zoo: Zoo, folder: Path | str, max_rank: int = 256) -> LoraAdapter:
    found = find_adapter(str(folder)) or fetch_adapter(str(folder))
    return read_folder(found, zoo.loaded(VARIANT).spec, max_rank)


def configure(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


# ---------------------------------------------------------------- what is read


def test_tensors_ranks_and_scalings(zoo: Zoo, tmp_path: Path) -> None:
    spec = AdapterSpec(
        rank=4,
        alpha=8,
        rank_pattern={"q_proj": 9, r"layers\.[12]\.mlp\.(up|gate)_proj": 2},
        alpha_pattern={"^model.layers.0.self_attn.k_proj": 3},
    )
    adapter = read(zoo, make_adapter(zoo.folder(VARIANT), tmp_path / "a", spec))
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert adapter.rank == 9
    first, last = adapter.layers[0], adapter.layers[2]
    assert torch.equal(first["self_attn.q_proj"].shrink, stored[f"{LAYER_0_Q}.lora_A.weight"])
    assert torch.equal(first["self_attn.q_proj"].expand, stored[f"{LAYER_0_Q}.lora_B.weight"])
    assert first["self_attn.q_proj"].scaling == 8 / 9
    assert first["self_attn.k_proj"].scaling == 3 / 4
    assert last["self_attn.k_proj"].scaling == 8 / 4
    assert (first["mlp.up_proj"].rank, last["mlp.up_proj"].rank) == (4, 2)
    assert last["mlp.gate_proj"].scaling == 8 / 2


def test_rank_stabilised_scaling(zoo: Zoo, folder: Path) -> None:
    configure(folder, use_rslora=True, lora_alpha=6)
    assert read(zoo, folder).layers[1]["mlp.down_proj"].scaling == 6 / 4**0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files(zoo: Zoo, folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    stored = load_file(folder / "adapter_model.safetensors")
    factors = read(zoo, folder).layers[0]["self_attn.q_proj"]
    assert factors.expand.dtype is dtype
    assert torch.equal(factors.expand, stored[f"{LAYER_0_Q}.lora_B.weight"])


def test_the_digest_is_of_what_counts(zoo: Zoo, original: Path, folder: Path) -> None:
    digest = read(zoo, original).digest
    path = folder / "adapter_model.safetensors"
    backwards = dict(reversed(load_file(path).items()))
    save_file(backwards, path, metadata={"of": "another framework"})
    configure(folder, base_model_name_or_path="elsewhere", lora_dropout=0.1, r=4, revision="x")
    assert read(zoo, folder).digest == digest, "place, order and training do not count"
    configure(folder, rank_pattern={"q_proj": 4}, r=4)
    assert read(zoo, folder).digest == digest, "said in another way"

    configure(folder, lora_alpha=9)
    assert read(zoo, folder).digest != digest
    configure(folder, lora_alpha=8)
    assert read(zoo, folder).digest == digest

    def nudge(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER_0_Q}.lora_B.weight"][3, 1] += 1e-6

    rewrite(folder, nudge)
    assert read(zoo, folder).digest != digest


def test_swapped_modules_are_another_adapter(zoo: Zoo, original: Path, folder: Path) -> None:
    def swap(tensors: dict[str, Tensor]) -> None:
        for factor in ("lora_A.weight", "lora_B.weight"):
            one = f"base_model.model.model.layers.0.mlp.up_proj.{factor}"
            two = f"base_model.model.model.layers.0.mlp.gate_proj.{factor}"
            tensors[one], tensors[two] = tensors[two], tensors[one]

    rewrite(folder, swap)
    assert read(zoo, folder).digest != read(zoo, original).digest


# ---------------------------------------------------------------- what is refused

CONFIGS: list[tuple[dict[str, object], str]] = [
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
    ({"peft_type": None}, "peft_type is None"),
    ({"use_dora": True}, "use_dora is set"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"bias": "lora_only"}, "bias is 'lora_only'"),
    ({"lora_bias": True}, "lora_bias is set"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is set"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
    ({"target_parameters": ["x"]}, "target_parameters is set"),
    ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is set"),
    ({"use_qalora": True}, "use_qalora is set"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is set"),
    ({"arrow_config": {"top_k": 2}}, "arrow_config is set"),
    ({"kasa_config": {"beta": 1}}, "kasa_config is set"),
    ({"velora_config": {"scale": 1}}, "velora_config is set"),
    ({"monteclora_config": {"x": 1}}, "monteclora_config is set"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
    ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
    ({"init_lora_weights": "corda"}, "init_lora_weights is 'corda'"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
    ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga'"),
    ({"init_lora_weights": ["x"]}, "init_lora_weights is"),
    ({"a_later_variant": {"x": 1}}, "'a_later_variant' is set, which is not known"),
    ({"r": 5}, r"rank 5 of adapter_config.json want \[5, 48\]"),
    ({"r": 0}, "r is 0"),
    ({"r": True}, "r is True"),
    ({"r": "4"}, "r is '4'"),
    ({"r": 10**30}, "r is 1000"),
    ({"r": 257}, "q_proj has rank 257, the largest served is 256"),
    ({"rank_pattern": {"q_proj": 300}}, "q_proj has rank 300"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern is 0"),
    ({"rank_pattern": [4]}, r"rank_pattern is \[4\]"),
    ({"rank_pattern": {"(": 4}}, "rank_pattern: '\\(' is no regular expression"),
    ({"rank_pattern": dict.fromkeys(map(str, range(5000)), 4)}, "5000 entries"),
    ({"lora_alpha": "8"}, "lora_alpha is '8'"),
    ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
    ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern is None"),
    ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
    ({"lora_alpha": 1e300}, "lora_B.weight holds values that are not finite"),
]


@pytest.mark.parametrize(("changes", "reason"), CONFIGS, ids=lambda value: str(value)[:40])
def test_settings_that_cannot_be_served(
    zoo: Zoo, folder: Path, changes: dict[str, object], reason: str
) -> None:
    configure(folder, **changes)
    with pytest.raises(AdapterError, match=f"^incompatible: .*{reason}"):
        read(zoo, folder)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_beginnings_that_leave_the_base_model_alone(zoo: Zoo, folder: Path, init: object) -> None:
    configure(folder, init_lora_weights=init)
    assert read(zoo, folder).rank == 4


def _renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def _set(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


TENSORS: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (lambda tensors: tensors.clear(), "it holds no tensors"),
    (lambda t: t.pop(f"{LAYER_0_Q}.lora_A.weight"), "lora_B.weight, but no lora_A"),
    (lambda t: t.pop(f"{LAYER_0_Q}.lora_B.weight"), "lora_A.weight, but no lora_B"),
    (
        _set(f"{LAYER_0_Q}.lora_A.weight", torch.zeros(4, 47)),
        r"q_proj.lora_A.weight is \[4, 47\], the base model and rank 4 .* want \[4, 48\]",
    ),
    (
        _set(f"{LAYER_0_Q}.lora_B.weight", torch.zeros(64, 4)),
        r"q_proj.lora_B.weight is \[64, 4\], .* want \[48, 4\]",
    ),
    (_set(f"{LAYER_0_Q}.lora_A.weight", torch.zeros(192)), r"is \[192\]"),
    (_set(f"{LAYER_0_Q}.lora_A.weight", torch.zeros(4, 48).double()), "is F64"),
    (_set(f"{LAYER_0_Q}.lora_A.weight", torch.full((4, 48), torch.nan)), "not finite"),
    (_set(f"{LAYER_0_Q}.lora_B.weight", torch.full((48, 4), -torch.inf)), "not finite"),
    (_set(f"{LAYER_0_Q}.lora_B.bias", torch.zeros(48)), "biases"),
    (_set(f"{LAYER_0_Q}.lora_magnitude_vector", torch.zeros(48)), "DoRA"),
    (
        _set("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4, 300)),
        "embed_tokens.lora_embedding_A: embeddings",
    ),
    (_set("base_model.model.model.embed_tokens.weight", torch.zeros(300, 48)), "embeddings"),
    (_set("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 48)), "output layer"),
    (_set(f"{LAYER_0_Q}.lora_velora_embed", torch.zeros(1)), "no LoRA weight of this model"),
    (
        _renamed(f"{LAYER_0_Q}.lora_A.weight", f"{LAYER_0_Q}.lora_A.default.weight"),
        "no LoRA weight of this model",
    ),
    (
        _set("base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight", torch.zeros(4, 48)),
        "layers.3.self_attn.q_proj.lora_A.weight: the base model has 3 layers",
    ),
    (
        _set("base_model.model.model.layers.0.mlp.router.lora_A.weight", torch.zeros(4, 48)),
        "only q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj can be adapted",
    ),
    (
        lambda t: t.update({f"{LAYER_0_Q.replace('.0.', '.00.')}.lora_A.weight": torch.zeros(4)}),
        "comes twice",
    ),
]


@pytest.mark.parametrize(("change", "reason"), TENSORS, ids=[reason[:40] for _, reason in TENSORS])
def test_tensors_that_do_not_fit(
    zoo: Zoo, folder: Path, change: Callable[[dict[str, Tensor]], object], reason: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(AdapterError, match=f"^incompatible: .*{reason}"):
        read(zoo, folder)


def test_a_rank_above_the_servers_limit(zoo: Zoo, folder: Path) -> None:
    assert read(zoo, folder, max_rank=4).rank == 4
    with pytest.raises(AdapterError, match="rank 4, the largest served is 3"):
        read(zoo, folder, max_rank=3)


# ---------------------------------------------------------------- files that are nonsense


def test_missing_files(zoo: Zoo, folder: Path, tmp_path: Path) -> None:
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"no adapter_model\.safetensors; only"):
        read(zoo, folder)
    config.unlink()
    with pytest.raises(AdapterError, match=r"has no adapter_config\.json"):
        read(zoo, folder)
    with pytest.raises(AdapterError, match="there is no adapter folder"):
        read(zoo, tmp_path / "nowhere")
    with pytest.raises(AdapterError, match="no folder and no Hugging Face id"):
        read(zoo, "a//b")
    for path in ("\0", "~nobody-of-that-name/x", "/" + "x" * 5000):
        with pytest.raises(AdapterError):
            read(zoo, path)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"x":' * 50_000, b'"' + b"x" * 2**21]
)
def test_nonsense_for_a_config(zoo: Zoo, folder: Path, text: bytes) -> None:
    (folder / "adapter_config.json").write_bytes(text)
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        read(zoo, folder)


def test_a_huge_config_is_not_read(zoo: Zoo, folder: Path) -> None:
    os.truncate(folder / "adapter_config.json", 5 << 30)
    with pytest.raises(AdapterError, match="is longer than"):
        read(zoo, folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["loop", "pipe", "folder", "device"])
def test_what_is_no_file(zoo: Zoo, folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink()
    make: dict[str, Callable[[], Any]] = {
        "loop": lambda: path.symlink_to(path),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
    }
    make[kind]()
    with pytest.raises(AdapterError, match=f"has no {name}"):
        read(zoo, folder)


def _header(length: int, text: bytes) -> bytes:
    return length.to_bytes(8, "little") + text


NONSENSE = [
    b"",
    b"\1",
    _header(1 << 62, b"{}"),
    _header(3, b"{}"),
    _header(2, b"[]"),
    _header(1, b"{"),
    _header(100_000, b"[" * 100_000),
    _header(4, b'{"x"'),
    _header(8, b'{"x":[]}'),
]
ENTRIES = [
    '{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 15]}}',
    '{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
    '{"x": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}}',
    '{"x": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}',
    '{"x": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}',
    '{"x": {"dtype": "F32", "shape": [99999999999999999999], "data_offsets": [0, 16]}}',
]


@pytest.mark.parametrize("content", NONSENSE + [_header(len(e), e.encode()) for e in ENTRIES])
def test_nonsense_for_weights(zoo: Zoo, folder: Path, content: bytes) -> None:
    (folder / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is damaged"):
        read(zoo, folder)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_a_file_that_is_cut_off(zoo: Zoo, folder: Path, kept: float) -> None:
    path = folder / "adapter_model.safetensors"
    os.truncate(path, int(path.stat().st_size * kept))
    with pytest.raises(AdapterError, match="is damaged"):
        read(zoo, folder)


def test_a_file_that_is_cut_off_while_it_is_read(zoo: Zoo, folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    with pytest.raises(AdapterError, match="is damaged: it ends inside"):
        read_folder(folder, zoo.loaded(VARIANT).spec, 256, lambda: os.truncate(path, 9000))


def test_patterns_that_would_match_for_years(
    zoo: Zoo, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.engine.lora.patterns.MATCH_S", 0.5)
    configure(folder, rank_pattern={r"(\w+\.?)+!": 4})
    with pytest.raises(AdapterError, match=r"patterns take more than 0\.5 s"):
        read(zoo, folder)
