"""Small random LoRA adapters, written by PEFT so that their format is the real one, and PEFT's own
answers, which are the oracle.

Each adapted module's change is about half as large as the module's own weights, so an adapter's
greedy output parts from the base model's, and from another adapter's, within a few tokens.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STRENGTH = 0.5
"""Size of an adapter's change, relative to the weights that it changes."""


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """What to ask PEFT for; `more` goes to its `LoraConfig` as it is."""

    rank: int = 8
    alpha: float = 16
    targets: Sequence[str] | str = ALL_TARGETS
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    strength: float = STRENGTH
    more: Mapping[str, Any] = field(default_factory=dict)


ADAPTERS: Mapping[str, AdapterSpec] = {
    "all-8": AdapterSpec(seed=1),
    "qv-4": AdapterSpec(rank=4, targets=("q_proj", "v_proj"), seed=2, strength=0.8),
    "mlp-16-rslora": AdapterSpec(
        rank=16, alpha=8, targets=("gate_proj", "up_proj", "down_proj"), rslora=True, seed=3
    ),
    "uneven-12": AdapterSpec(
        rank=5,
        rank_pattern={"q_proj": 12, r"layers\.[01]\.mlp\.down_proj": 3, "o_proj": 1},
        alpha_pattern={"q_proj": 4, "layers.1.self_attn.v_proj": 40},
        seed=4,
    ),
    "odd-layers-33": AdapterSpec(rank=33, seed=5, more={"layers_to_transform": [1]}, strength=1.0),
}
"""Adapters that differ in everything an adapter can differ in, for any decoder of two layers on."""


def make_adapter(model: Path, folder: Path, spec: AdapterSpec | None = None) -> Path:
    """Save an adapter for the model in `model`; gives `folder`. Equal arguments, equal content.

    Leaves torch's global random state as it was.
    """
    spec = spec or AdapterSpec()
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(spec.seed)
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,  # type: ignore[arg-type]
            target_modules=spec.targets if isinstance(spec.targets, str) else list(spec.targets),
            use_rslora=spec.rslora,
            rank_pattern=dict(spec.rank_pattern),
            alpha_pattern=dict(spec.alpha_pattern),
            task_type="CAUSAL_LM",
            **spec.more,
        )
        adapted = get_peft_model(_base(model, torch.float32), config)
        _randomise(adapted, spec.strength)
        adapted.save_pretrained(str(folder))
    return folder


def make_adapters(model: Path, root: Path, names: Sequence[str] = ()) -> dict[str, Path]:
    """`ADAPTERS`, or those of them that are named, as folders below `root`."""
    return {
        name: make_adapter(model, root / name, ADAPTERS[name]) for name in names or tuple(ADAPTERS)
    }


class PeftOracle:
    """What transformers and PEFT compute for a model with any of its adapters."""

    def __init__(
        self, model: Path, adapters: Mapping[str, Path], dtype: torch.dtype = torch.float32
    ) -> None:
        self._model: Any = _base(model, dtype)
        with _quiet():
            for name, folder in adapters.items():
                if isinstance(self._model, PeftModel):
                    self._model.load_adapter(str(folder), adapter_name=_label(name))
                else:
                    self._model = PeftModel.from_pretrained(
                        self._model, str(folder), adapter_name=_label(name)
                    )
        self._model.eval()

    def greedy(self, adapter: str | None, prompt: Sequence[int], count: int) -> list[int]:
        """`count` tokens, not stopping at end-of-sequence; None for the base model."""
        tokens = torch.tensor([list(prompt)])
        with self._active(adapter), torch.no_grad():
            output = self._model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=count,
                eos_token_id=[],
            )
        ids: list[int] = output[0].tolist()
        return ids[len(prompt) :]

    def logits(self, adapter: str | None, prompt: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab_size] in float32."""
        with self._active(adapter), torch.no_grad():
            logits: torch.Tensor = self._model(torch.tensor([list(prompt)])).logits[0]
        return logits.float()

    @contextmanager
    def _active(self, adapter: str | None) -> Iterator[None]:
        with _quiet():
            if adapter is not None:
                self._model.set_adapter(_label(adapter))
                yield
            elif isinstance(self._model, PeftModel):
                with self._model.disable_adapter():
                    yield
            else:
                yield


def greedy_tokens(
    model: Path, adapter: Path | None, prompt: Sequence[int], count: int
) -> list[int]:
    """One answer in float32; use a `PeftOracle` for more."""
    adapters = {} if adapter is None else {"adapter": adapter}
    return PeftOracle(model, adapters).greedy("adapter" if adapter else None, prompt, count)


def _base(model: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype)


def _label(name: str) -> str:
    """PEFT makes modules of adapter names: a dot would divide them."""
    return name.replace(".", "_")


def _randomise(adapted: Any, strength: float) -> None:
    layers: list[Any] = [
        module
        for module in adapted.modules()
        if isinstance(module, LoraLayer) and "default" in module.lora_A
    ]
    with torch.no_grad():
        for layer in layers:
            shrink, expand = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            rank, in_features = shrink.shape
            shrink.normal_(0.0, in_features**-0.5)
            size = strength * float(layer.get_base_layer().weight.std()) * in_features**0.5
            expand.normal_(0.0, size / (layer.scaling["default"] * rank**0.5))


@contextmanager
def _quiet() -> Iterator[None]:
    """PEFT asks transformers for what is deprecated, and warns of layers it does not know."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
