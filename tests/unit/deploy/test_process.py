"""What a node does to its surroundings before torch and NIXL read them."""

import os

import pytest

from common.config import NodeConfig
from deploy.process import prepare

TIMEOUT = "UCX_TCP_USER_TIMEOUT"


def test_kv_that_nobody_acknowledges_breaks_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "")  # so that the test's end restores what was there
    monkeypatch.delenv(TIMEOUT)
    prepare(NodeConfig(tcp_timeout_s=2.5))
    assert os.environ[TIMEOUT] == "2.5s"


def test_what_the_operator_says_of_the_time_out_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "1m")
    prepare(NodeConfig())
    assert os.environ[TIMEOUT] == "1m"
