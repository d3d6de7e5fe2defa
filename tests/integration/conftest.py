"""What several integration tests share."""

from pathlib import Path

import pytest

from tests.integration.router_rig import make_folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))
