"""What several integration tests share."""

from pathlib import Path

import pytest

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
