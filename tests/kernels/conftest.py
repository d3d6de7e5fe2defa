"""What the tests of kernels share; `tests/conftest.py` has Triton interpreted."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The reference's products are tiny, too."""
    torch.set_num_threads(1)
