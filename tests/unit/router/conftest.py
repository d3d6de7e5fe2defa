"""Tokenizers as the router reads them, from folders as Hugging Face would serve them."""

import json
from pathlib import Path

import pytest

from router.tokens import TextCodec, load_codec
from tests.tiny_models import MAX_POSITIONS, VOCAB_SIZE, make_tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_tokenizer().save_pretrained(folder)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_POSITIONS, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def codec(tiny_folder: Path) -> TextCodec:
    return load_codec(tiny_folder)


@pytest.fixture(scope="session")
def default_folder() -> Path:
    folder = Path.home() / ".cache" / "pdserve" / "models" / "smollm2-135m-instruct"
    if not folder.is_dir():
        pytest.skip("the default model is not on this machine")
    return folder
