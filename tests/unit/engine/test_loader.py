"""What a model folder may contain, and how clearly the rest is refused."""

import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from common.engine import loader
from common.engine.decoder import Weights
from common.engine.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from common.engine.loader import _choose_dtype, load_model, resolve
from common.engine.parallel.shards import Shard
from common.engine.rope import RopeTable, frequencies
from common.engine.spec import ModelSpec, fingerprint
from common.messages import WIRE_VERSION
from tests.unit.engine.conftest import VARIANTS, Zoo
from tests.unit.engine.driving import Engine, greedy


@pytest.fixture
def copy(zoo: Zoo, tmp_path: Path) -> Callable[[str], Path]:
    def make(variant: str) -> Path:
        return Path(shutil.copytree(zoo.folder(variant), tmp_path / variant))

    return make


def edit_config(folder: Path, **changes: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, file)
    return folder


def test_specs_say_what_the_configs_say(zoo: Zoo) -> None:
    llama = zoo.loaded("llama").spec
    assert (llama.num_layers, llama.num_heads, llama.num_kv_heads, llama.head_dim) == (3, 6, 2, 8)
    assert (llama.vocab_size, llama.max_positions, llama.eos_token_ids) == (300, 512, (2,))
    assert llama.windows == (None, None, None)
    assert (llama.qkv_bias, llama.qk_norm, llama.tied_embeddings) == (False, False, False)
    assert zoo.loaded("mistral").spec.windows == (24, 24, 24)
    assert zoo.loaded("qwen2").spec.qkv_bias
    assert zoo.loaded("qwen2").spec.windows == (None, None, None)
    assert zoo.loaded("qwen2-sliding").spec.windows == (None, 20, 20)
    assert zoo.loaded("qwen3").spec.qk_norm
    assert zoo.loaded("smollm2").spec.tied_embeddings
    assert zoo.loaded("llama-rope-llama3").spec.rope_type == "llama3"


def test_generation_config_names_the_end_of_sequence(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_model(folder).spec.eos_token_ids == (7, 8)
    (folder / "generation_config.json").unlink()
    assert load_model(folder).spec.eos_token_ids == (2,)


def test_older_rope_settings_are_understood(copy: Callable[[str], Path], zoo: Zoo) -> None:
    folder = copy("llama")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    (folder / "config.json").write_text(json.dumps(config))
    spec = load_model(folder).spec
    assert spec.rope_type == "linear"
    assert dict(spec.rope_parameters)["rope_theta"] == 5000.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_rotations_equal_transformers(zoo: Zoo, variant: str) -> None:
    config = AutoConfig.from_pretrained(zoo.folder(variant))
    spec = ModelSpec.from_config(config)
    positions = torch.tensor([0, 1, 17, 400, 511])
    table = RopeTable(frequencies(config, spec), 512, torch.float32)
    cos, sin = table.at(positions)
    theirs = zoo.reference(variant).model.rotary_emb(torch.zeros(1), positions[None])
    half = spec.head_dim // 2
    torch.testing.assert_close(cos[:, 0], theirs[0][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:, 0, half:], theirs[1][0][:, half:], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:, 0, :half], -theirs[1][0][:, :half], rtol=0, atol=1e-6)


def test_sharded_checkpoints(zoo: Zoo, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(zoo.folder("qwen3"))
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = list(range(10, 30))
    got = Engine(load_model(tmp_path)).generate(tokens, greedy(6)).outputs
    assert got == zoo.greedy("qwen3", tokens, 6)


def test_dtypes(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    assert load_model(folder).dtype_name == "float32"
    assert load_model(folder, "bfloat16").dtype is torch.bfloat16
    edit_config(folder, dtype="bfloat16")
    assert load_model(folder).dtype is torch.bfloat16
    assert load_model(folder, "float32").dtype is torch.float32
    edit_config(folder, dtype="float16")
    assert load_model(folder).dtype is torch.float32
    half = load_model(folder, "float16")
    assert (half.dtype, half.dtype_name) == (torch.float16, "float16")
    meta = torch.device("meta")
    assert _choose_dtype(AutoConfig.from_pretrained(folder), "auto", meta) is torch.float16


def test_weights_are_made_on_the_device_and_filled_one_at_a_time(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No whole model beside it: what a file gives is let go before the next one is read."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    stored = loader._stored

    class Watched:
        def __init__(self, inner: loader.Stored) -> None:
            self.get_shape = inner.get_shape
            self._inner = inner

        def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
            nonlocal most
            tensor = self._inner[index]
            alive.append(weakref.ref(tensor))
            most = max(most, sum(held() is not None for held in alive))
            return tensor

    def watched(file: Path) -> Iterator[tuple[str, loader.Stored]]:
        return ((name, Watched(inner)) for name, inner in stored(file))

    monkeypatch.setattr(loader, "_stored", watched)
    spec = zoo.loaded("llama").spec
    places = Weights.empty(spec, torch.float16, torch.device("meta")).checkpoint_tensors(spec)
    assert {place.device.type for place in places.values()} == {"meta"}
    loader._fill(places, [zoo.folder("llama") / "model.safetensors"], Shard.of(spec))
    assert len(alive) == len(places)
    assert most == 1


def test_digest_and_fingerprint_tell_models_apart(zoo: Zoo, copy: Callable[[str], Path]) -> None:
    one, same = zoo.loaded("llama"), load_model(copy("llama"))
    assert one.digest == same.digest
    assert one.digest != zoo.loaded("llama-rope-linear").digest
    got = fingerprint(one.spec, one.digest, one.dtype_name, 16)
    assert (got.wire_version, got.model, got.dtype) == (WIRE_VERSION, one.digest, "float32")
    assert (got.num_layers, got.num_kv_heads, got.head_dim, got.page_size) == (3, 2, 8, 16)


def test_unsupported_models_are_named(copy: Callable[[str], Path]) -> None:
    folder = edit_config(copy("llama"), architectures=["GPT2LMHeadModel"])
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel.*Qwen3ForCausalLM"):
        load_model(folder)
    edit_config(folder, architectures=["LlamaForCausalLM"], hidden_act="gelu")
    with pytest.raises(UnsupportedModelError, match="gelu"):
        load_model(folder)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    edit_config(folder, hidden_act="silu", rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match=r"dynamic.*yarn"):
        load_model(folder)


def test_weights_that_do_not_fit_are_named(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    edit_weights(folder, extra__weight=torch.zeros(1))
    with pytest.raises(WeightsError, match=r"extra\.weight"):
        load_model(folder)
    edit_weights(folder, extra__weight=None, model__norm__weight=None)
    with pytest.raises(WeightsError, match=r"lacks model\.norm\.weight"):
        load_model(folder)
    edit_weights(folder, model__norm__weight=torch.zeros(47))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is \[47\].*\[48\]"):
        load_model(folder)
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0damaged")
    with pytest.raises(WeightsError, match="damaged"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has no model\.safetensors"):
        load_model(folder)


def test_a_copy_of_tied_weights_and_old_buffers_are_passed_over(
    copy: Callable[[str], Path],
) -> None:
    folder = edit_weights(
        copy("smollm2"),
        lm_head__weight=torch.zeros(300, 48),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8),
    )
    load_model(folder)


def test_resolve(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    for name in (str(tmp_path / "none"), "./none", "no/such/thing/at/all"):
        with pytest.raises(ModelNotFoundError):
            resolve(name)
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        load_model(tmp_path)
