"""What several integration tests share."""

import random
from pathlib import Path

import pytest

from tests.faults.load import Work
from tests.integration.lora_rig import Wardrobe, make_wardrobe
from tests.integration.router_rig import make_folder
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def wardrobe(tmp_path_factory: pytest.TempPathFactory) -> Wardrobe:
    folder = tmp_path_factory.mktemp("wardrobe")
    return make_wardrobe(make_tiny_model("llama", folder / "model"), folder / "adapters")


@pytest.fixture(scope="session")
def lora_works(wardrobe: Wardrobe) -> list[Work]:
    """Eight requests for each adapter and the base model in turn: prompts of 1 to 250 tokens,
    answers of 120. peft takes seconds for them, so all tests share them; see `Work.cut`."""
    return wardrobe.works(random.Random(4), 8, (1, 250), (120, 120))
