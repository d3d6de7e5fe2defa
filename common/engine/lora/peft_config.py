"""`adapter_config.json` as PEFT writes it: what scales an adapter, and what is refused.

Checked against PEFT 0.21. What its other settings mean for serving: nothing (targets: the tensors
decide; dropout; how training began), or something that is computed differently, which is refused
here by its name. So is a setting that is unknown and set, since it may be of that second kind.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.engine.errors import AdapterError
from common.engine.lora.patterns import PatternError, first_matches

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERNS = 4096

_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
    "unsloth_fixed",
})  # fmt: skip
_READ = frozenset({
    "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern",
    "use_rslora",
})  # fmt: skip
_REFUSED = {
    "use_dora": "DoRA adapters cannot be served",
    "lora_bias": "adapters with biases cannot be served",
    "modules_to_save": "whole modules beside the adapter cannot be served",
    "trainable_token_indices": "changed embeddings cannot be served",
    "target_parameters": "only linear layers can be adapted",
    "fan_in_fan_out": "no layer of this model stores its weights transposed",
    "layer_replication": "the base model's layers stay as they are",
    "alora_invocation_tokens": "activated LoRA (aLoRA) cannot be served",
    "use_qalora": "QALoRA cannot be served",
    "use_bdlora": "block-diagonal LoRA (BD-LoRA) cannot be served",
    "arrow_config": "Arrow routing cannot be served",
    "kasa_config": "KaSA changes the base model's weights",
    "velora_config": "VeLoRA cannot be served",
    "monteclora_config": "MonteCLoRA cannot be served",
}
_INITS_THAT_KEEP_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")
"""Beside true and false. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change the base model's weights;
PEFT turns those that were converted back into plain adapters, and then writes `true`."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What of the file determines an adapter's result."""

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def scalings(self, modules: Sequence[str]) -> dict[str, tuple[int, float]]:
        """(rank, scaling) of each module, by its name in the base model.

        Raises AdapterError: a pattern is no regular expression, or takes too long.
        """
        ranks = _by_pattern(modules, self.rank_pattern, self.rank, "rank_pattern")
        alphas = _by_pattern(modules, self.alpha_pattern, self.alpha, "alpha_pattern")
        found = {}
        for module, rank, alpha in zip(modules, ranks, alphas, strict=True):
            found[module] = int(rank), alpha / (math.sqrt(rank) if self.rslora else rank)
        return found


def incompatible(why: str) -> AdapterError:
    """The error of an adapter that was read, and does not fit this model or this server."""
    return AdapterError(f"incompatible: {why}")


def read_config(folder: Path) -> PeftConfig:
    """Read and judge the file in `folder`. Raises AdapterError, or OSError."""
    settings = _load(folder)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise incompatible(f"peft_type is {_shown(kind)}, only LORA can be served")
    for name, reason in _REFUSED.items():
        if settings.get(name):
            raise incompatible(f"{name} is set: {reason}")
    if settings.get("bias", "none") != "none":
        raise incompatible(f"bias is {_shown(settings['bias'])}, only none can be served")
    _refuse_init(settings.get("init_lora_weights", True))
    for name, value in settings.items():
        if value and name not in _HARMLESS and name not in _READ and name not in _REFUSED:
            raise incompatible(f"{_shown(name)} is set, which is not known here")
    rslora = settings.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise incompatible(f"use_rslora is {_shown(rslora)}")
    return PeftConfig(
        rank=_rank(settings.get("r", 8), "r"),
        alpha=_alpha(settings.get("lora_alpha", 8), "lora_alpha"),
        rslora=rslora,
        rank_pattern={k: _rank(v, "rank_pattern") for k, v in _pattern(settings, "rank_pattern")},
        alpha_pattern={
            k: _alpha(v, "alpha_pattern") for k, v in _pattern(settings, "alpha_pattern")
        },
    )


def _load(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise AdapterError(f"{folder} has no {CONFIG_FILE}")
    with path.open("rb") as file:
        text = file.read(MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise AdapterError(f"{CONFIG_FILE} is longer than {MAX_CONFIG_BYTES} bytes")
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise AdapterError(f"{CONFIG_FILE} holds no object")
    return settings


def _refuse_init(init: object) -> None:
    if init is None or isinstance(init, bool) or init in _INITS_THAT_KEEP_THE_BASE:
        return
    raise incompatible(
        f"init_lora_weights is {_shown(init)}, which may change the base model's weights; PEFT can "
        "convert it (save_pretrained with path_initial_model_for_weight_conversion)"
    )


def _pattern(settings: Mapping[str, Any], name: str) -> list[tuple[str, object]]:
    pattern = settings.get(name) or {}
    if not isinstance(pattern, dict):
        raise incompatible(f"{name} is {_shown(pattern)}")
    if len(pattern) > MAX_PATTERNS:
        raise incompatible(f"{name} has {len(pattern)} entries, {MAX_PATTERNS} are allowed")
    return list(pattern.items())


def _rank(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 20:
        raise incompatible(f"{name} is {_shown(value)}, which is no rank")
    return value


def _alpha(value: object, name: str) -> float:
    try:
        alpha = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        alpha = math.inf
    if isinstance(value, bool) or not math.isfinite(alpha):
        raise incompatible(f"{name} is {_shown(value)}, alpha is a number")
    return alpha


def _by_pattern(
    modules: Sequence[str], pattern: Mapping[str, float], default: float, name: str
) -> list[float]:
    """Each module's value: that of the first entry that matches it, or the default."""
    try:
        matches = first_matches(tuple(pattern), modules)
    except PatternError as error:
        raise incompatible(f"{name}: {error}") from error
    # An entry that matches nothing as a pattern may still be the module's very name.
    return [
        pattern[match] if match is not None else pattern.get(module, default)
        for module, match in zip(modules, matches, strict=True)
    ]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
