"""Models shared by the engine's tests, made once a session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.engine.loader import DtypeName, LoadedModel, load_model
from tests.tiny_models import make_tiny_model

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_SLIDING = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-rope-linear": ("llama", {"rope_parameters": _LINEAR}),
    "qwen2-rope-yarn": ("qwen2", {"rope_parameters": _YARN}),
    "smollm2": ("smollm2", {}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", _SLIDING),
    "qwen3": ("qwen3", {}),
}


class Zoo:
    """Folders, native models and transformers models of the variants."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._loaded: dict[tuple[str, str], LoadedModel] = {}
        self._references: dict[str, PreTrainedModel] = {}

    def folder(self, variant: str) -> Path:
        folder = self._root / variant
        if not folder.exists():
            kind, overrides = VARIANTS[variant]
            make_tiny_model(kind, folder, seed=3, **overrides)
        return folder

    def loaded(self, variant: str, dtype: DtypeName = "float32") -> LoadedModel:
        key = variant, dtype
        if key not in self._loaded:
            self._loaded[key] = load_model(self.folder(variant), dtype)
        return self._loaded[key]

    def reference(self, variant: str) -> PreTrainedModel:
        if variant not in self._references:
            model = AutoModelForCausalLM.from_pretrained(self.folder(variant))
            self._references[variant] = model
        return self._references[variant]

    def forget(self, variant: str) -> None:
        """The reference was changed: load it anew next time."""
        self._references.pop(variant)

    def greedy(self, variant: str, prompt: list[int], count: int) -> list[int]:
        """What transformers generates, not stopping at end-of-sequence."""
        tokens = torch.tensor([prompt])
        # With no mask given, transformers hides every pad token that a prompt happens to contain.
        output = self.reference(variant).generate(  # type: ignore[operator]
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=[],
        )
        ids: list[int] = output[0].tolist()
        return ids[len(prompt) :]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    """Makes a prompt of any length; another `seed`, another prompt."""

    def make(length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, 300, (length,), generator=generator).tolist()

    return make
