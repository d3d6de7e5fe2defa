"""Turn a GGUF checkpoint into a Hugging Face folder: `convert_gguf.py SOURCE.gguf TARGET_FOLDER`.

A program of its own, so that its caller need not import torch and gives all memory back afterwards.
The weights are de-quantised to bfloat16; tied embeddings stay tied (one tensor in the file).
"""

import sys
from pathlib import Path


def convert(source: Path, target: Path) -> None:
    """Write config, generation config, weights and tokenizer of `source` into `target`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype="bfloat16",
    )
    # GGUF's own name of the model is its author's working title; a folder needs no name inside.
    vars(model.config).pop("_model_name_or_path", None)
    model.save_pretrained(target)
    for weights in target.glob("*.safetensors"):
        weights.chmod(0o644)  # written private to its owner, whatever the umask says
    context_length = model.config.max_position_embeddings
    del model
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if not tokenizer.chat_template or tokenizer.eos_token is None:
        raise ValueError(f"{source.name} holds no chat template or no end-of-sequence token")
    # GGUF metadata does not carry this limit to the tokenizer, which then says 10^30.
    tokenizer.model_max_length = context_length
    tokenizer.save_pretrained(target)
    for required in ("config.json", "generation_config.json", "model.safetensors"):
        if not (target / required).is_file():
            raise ValueError(f"the conversion wrote no {required}")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
