"""A checkpoint of random weights in the shape of a model, made on a device, written to a folder.

As Hugging Face would serve it: `config.json`, one safetensors file a layer with an index, and a
tiny tokenizer, since whoever serves it speaks in token ids.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.gpu_cells.counts import layer_weights, model_weights
from benchmarks.gpu_cells.scale import with_layers
from common.engine.decoder import Weights
from common.engine.spec import ModelSpec
from tests.tiny_models import make_tiny_tokenizer

SPARE = 0.6
"""Of the free room on a disk that a checkpoint may take."""
LOGIT_SPREAD = 5.5
"""Standard deviation of a token's logits."""
_INDEX = "model.safetensors.index.json"


def fitting(spec: ModelSpec, dtype: torch.dtype, folder: Path) -> ModelSpec:
    """`spec` with as many of its layers as `folder` has room for; raises OSError if not for one."""
    room = int(shutil.disk_usage(folder).free * SPARE) // dtype.itemsize
    fixed = model_weights(spec) - spec.num_layers * layer_weights(spec)
    layers = min(spec.num_layers, (room - fixed) // layer_weights(spec))
    if layers < 1:
        raise OSError(f"{folder} has no room for a single layer")
    return with_layers(spec, layers)


def write_checkpoint(
    spec: ModelSpec, dtype: torch.dtype, folder: Path, device: str, seed: int = 0
) -> int:
    """Write a Llama of this shape into `folder`; gives its size in bytes.

    Weights are spread so that attention is peaked and outputs vary, and equal for equal arguments
    on the same kind of device.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(seed)
    files: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate(_parts(spec, dtype)):
        name = f"model-{number:05}.safetensors"
        made = {key: _random(key, like, device, generator) for key, like in tensors.items()}
        save_file(made, folder / name, {"format": "pt"})
        files |= dict.fromkeys(made, name)
        size += sum(tensor.nbytes for tensor in made.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / _INDEX).write_text(json.dumps(index))
    config = _config(spec)
    config.dtype = dtype
    config.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return size


def _parts(spec: ModelSpec, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Names and shapes (tensors without values) of what goes into one file: what is of no layer
    first, then each layer."""
    with torch.device("meta"):
        places = Weights.empty(spec, dtype).checkpoint_tensors(spec)
    by_layer: dict[str, dict[str, Tensor]] = {}
    for name, place in places.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        by_layer.setdefault(layer, {})[name] = place
    yield from by_layer.values()


def _random(name: str, like: Tensor, device: str, generator: torch.Generator) -> Tensor:
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        like = like[0]  # kept once a head in memory
    made = torch.empty(like.shape, dtype=like.dtype, device=device)
    if name.endswith("norm.weight"):
        made.uniform_(0.5, 1.5, generator=generator)
    elif name.endswith("bias"):
        made.normal_(0.0, 0.5, generator=generator)
    elif "embed" in name or "lm_head" in name:
        # Logits then differ by about as much as a trained model's, whatever the width.
        made.normal_(0.0, LOGIT_SPREAD / made.shape[-1] ** 0.5, generator=generator)
    else:
        made.normal_(0.0, 1.6 / made.shape[-1] ** 0.5, generator=generator)
    return made.cpu()


def _config(spec: ModelSpec) -> LlamaConfig:
    assert spec.architecture == "LlamaForCausalLM", "written for the Llama shape only"
    return LlamaConfig(
        architectures=[spec.architecture],
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        rms_norm_eps=spec.rms_norm_eps,
        tie_word_embeddings=spec.tied_embeddings,
        rope_parameters=dict(spec.rope_parameters),
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
