"""Tiny random models with a tiny real tokenizer, made on the spot for tests.

Each is a folder as Hugging Face would serve it: `config.json`, `generation_config.json`,
`model.safetensors` and the tokenizer files. Small enough that a forward pass takes about a
millisecond, with weights large enough that greedy output is varied and not one token repeated.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

KINDS = ("llama", "mistral", "qwen2", "qwen3", "smollm2")
VOCAB_SIZE = 300
MAX_POSITIONS = 512
SLIDING_WINDOW = 24
"""Of the mistral kind: small, so that most tests cross it."""

_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "the user and the assistant and the system",
    "Pages travel from the prefill node to the decode node.",
    "How many tokens are there in the answer? Those that are there.",
]


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 tokens: ids 0-2 are special, every byte has one, a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _build(kind: str, overrides: dict[str, Any]) -> PreTrainedModel:
    settings = _COMMON | overrides
    match kind:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**settings))
        case "smollm2":  # a Llama with tied embeddings and an uneven head count
            heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
            rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}
            tied = {"tie_word_embeddings": True}
            return LlamaForCausalLM(LlamaConfig(**(_COMMON | heads | rope | tied | overrides)))
        case "mistral":
            window = {"sliding_window": SLIDING_WINDOW, "head_dim": 16}
            return MistralForCausalLM(MistralConfig(**(_COMMON | window | overrides)))
        case "qwen2":
            tied = {"tie_word_embeddings": True}
            return Qwen2ForCausalLM(Qwen2Config(**(_COMMON | tied | overrides)))
        case "qwen3":
            head = {"head_dim": 16}
            return Qwen3ForCausalLM(Qwen3Config(**(_COMMON | head | overrides)))
        case _:
            raise ValueError(f"unknown kind {kind!r}; there are {', '.join(KINDS)}")


def make_tiny_model(kind: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Save a random float32 model of `kind` (one of `KINDS`) with its tokenizer; gives `folder`.

    `overrides` replace fields of the transformers config. Equal arguments make equal weights.
    Leaves torch's global random state as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(kind, overrides)
        _randomise(model)
    folder.mkdir(parents=True, exist_ok=True)
    # A checkpoint without end-of-sequence ids in its generation config would never stop.
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=2, pad_token_id=0
    )
    model.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def _randomise(model: PreTrainedModel) -> None:
    """Spread weights, biases and norms so that attention is peaked and every term matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif "embed" in name or "lm_head" in name:
                parameter.normal_(0.0, 0.8)
            else:
                parameter.normal_(0.0, 1.6 / parameter.shape[-1] ** 0.5)
