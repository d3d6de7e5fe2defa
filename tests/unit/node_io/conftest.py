from collections.abc import Iterator

import pytest
import zmq

from tests.unit.node_io.rig import FakeRouter


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made = zmq.Context()
    yield made
    made.destroy(0)


@pytest.fixture
def router(context: "zmq.Context[zmq.Socket[bytes]]") -> FakeRouter:
    return FakeRouter(context)


@pytest.fixture
def other_router(context: "zmq.Context[zmq.Socket[bytes]]") -> FakeRouter:
    return FakeRouter(context, "r2")
