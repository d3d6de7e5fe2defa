"""Clusters over namespaces, one for each shape; a machine without namespaces skips, saying why."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.multinode.lab import Lab, lab
from tests.multinode.network import CannotMakeHosts


@pytest.fixture(scope="package")
def labs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """2 prefill and 2 decode nodes, started once for all tests of this folder."""
    try:
        with lab(tmp_path_factory.mktemp("model") / "tiny", prefill=2, decode=2) as made:
            yield made
    except CannotMakeHosts as error:
        pytest.skip(f"no hosts of their own here: {error}")


@pytest.fixture
def two_and_two(labs: Lab) -> Lab:
    """The cluster whole, idle and healed, whatever the last test has done to it."""
    asyncio.run(labs.make_whole())
    return labs
