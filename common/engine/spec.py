"""What the engine needs to know of a model, taken once from its transformers config."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.engine.errors import UnsupportedModelError
from common.messages import WIRE_VERSION, Fingerprint

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder of the Llama shape. Counts are per model, not per device."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    """Longest sequence in tokens, prompt and output together."""
    rms_norm_eps: float
    eos_token_ids: tuple[int, ...]
    """From the generation config, else from the model's; empty if neither names any."""
    windows: tuple[int | None, ...]
    """Per layer: how many positions back a token sees, itself included; None sees all."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    rope_type: str
    rope_parameters: tuple[tuple[str, Any], ...]
    """Sorted (name, value) pairs of transformers' `rope_parameters`."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"rotary embedding needs an even head_dim: {self.head_dim}")

    @classmethod
    def from_config(
        cls, config: "PretrainedConfig", generation: "GenerationConfig | None" = None
    ) -> "ModelSpec":
        """Read a transformers config; raises `UnsupportedModelError` naming what does not work."""
        architecture = _architecture(config)
        _refuse_unknown_settings(config)
        rope = _rope_parameters(config)
        attention_bias = bool(getattr(config, "attention_bias", False))
        num_heads = config.num_attention_heads
        return cls(
            architecture=architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            max_positions=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            eos_token_ids=_eos_token_ids(config, generation),
            windows=_windows(config, architecture),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            output_bias=attention_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tied_embeddings=bool(config.tie_word_embeddings),
            rope_type=rope["rope_type"],
            rope_parameters=tuple(sorted(rope.items())),
        )


def fingerprint(spec: ModelSpec, model_digest: str, dtype: str, page_size: int) -> Fingerprint:
    """What two nodes compare before KV may travel between them."""
    return Fingerprint(
        wire_version=WIRE_VERSION,
        model=model_digest,
        dtype=dtype,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=page_size,
    )


def _architecture(config: "PretrainedConfig") -> str:
    named = list(config.architectures or [])
    for architecture in named:
        if architecture in ARCHITECTURES:
            return architecture
    what = " or ".join(named) or f"model type {config.model_type!r} without an architecture"
    raise UnsupportedModelError(f"{what} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _refuse_unknown_settings(config: "PretrainedConfig") -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError("quantised checkpoints are not supported; use plain weights")
    if config.hidden_act != "silu":
        raise UnsupportedModelError(f"activation {config.hidden_act!r} is not supported, only silu")


def _rope_parameters(config: "PretrainedConfig") -> dict[str, Any]:
    """transformers 5 folds the older `rope_theta` and `rope_scaling` into `rope_parameters`."""
    rope = dict(config.rope_parameters or {})
    rope.setdefault("rope_type", "default")
    if rope["rope_type"] not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope type {rope['rope_type']!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("rotating only part of a head is not supported")
    return rope


def _eos_token_ids(
    config: "PretrainedConfig", generation: "GenerationConfig | None"
) -> tuple[int, ...]:
    for source in (generation, config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def _windows(config: "PretrainedConfig", architecture: str) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    layers: int = config.num_hidden_layers
    if window is None or architecture == "LlamaForCausalLM":
        return (None,) * layers
    if architecture == "MistralForCausalLM":  # every layer slides
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
