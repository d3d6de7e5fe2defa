"""The tiny model's vocabulary, with logits padded beyond its tokens."""

import json
from pathlib import Path

import pytest

from common.grammar.vocabulary import Vocabulary, load_vocabulary
from tests.tiny_models import VOCAB_SIZE, make_tiny_tokenizer

PADDED_SIZE = VOCAB_SIZE + 20


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grammar")
    make_tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


@pytest.fixture(scope="session")
def vocabulary(folder: Path) -> Vocabulary:
    return load_vocabulary(folder, PADDED_SIZE)
