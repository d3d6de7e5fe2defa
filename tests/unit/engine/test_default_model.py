"""The default model itself, where it has been fetched: the sizes that tiny models do not have."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config import DEFAULT_MODEL
from common.engine.loader import load_model
from deploy.default_model import cache_root
from tests.unit.engine.driving import Engine, greedy


@pytest.mark.model
def test_greedy_text_equals_transformers() -> None:
    folder = cache_root() / "models" / DEFAULT_MODEL
    if not folder.is_dir():
        pytest.skip("the default model has not been fetched")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    prompt: list[int] = tokenizer.encode(text, add_special_tokens=False)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    # This model's pad token ends every turn: without a mask transformers would hide those.
    output = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=24,
        eos_token_id=[],
    )
    engine = Engine(load_model(folder, "float32"), page_size=16, num_pages=16)
    got = engine.generate(prompt, greedy(24), chunk=16)
    assert got.outputs == output[0].tolist()[len(prompt) :]
