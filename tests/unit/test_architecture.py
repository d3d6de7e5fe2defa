"""The tree obeys its structural rules, and each rule notices a planted violation."""

from pathlib import Path

import pytest

from tests.unit.architecture_rules import (
    PACKAGES,
    RULES,
    TOO_LONG_WITH_REASON,
    Rule,
    Source,
    impure_decisions,
    impure_router,
    modes_looked_at,
    read_sources,
    shapeless_names,
    stray_llguidance,
    stray_nixl,
    stray_torch,
    stray_triton,
    too_long,
    wrong_arrows,
)

ROOT = Path(__file__).parents[2]

LONG_FILE = "x = 1\n" * 401
LONG_FUNCTION = "def long():\n" + "    x = 1\n" * 60


@pytest.fixture(scope="module")
def tree() -> dict[str, Source]:
    return read_sources(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_obeys(rule: Rule, tree: dict[str, Source]) -> None:
    assert rule(tree) == []


def test_the_whole_tree_was_read(tree: dict[str, Source]) -> None:
    assert {source.package for source in tree.values()} >= {*PACKAGES, "tests"}
    assert "common/scheduler.py" in tree


def test_each_exception_is_still_needed(
    tree: dict[str, Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    excused = dict(TOO_LONG_WITH_REASON)
    monkeypatch.setattr("tests.unit.architecture_rules.TOO_LONG_WITH_REASON", {})
    found = too_long(tree)
    for name in excused:
        path, _, function = name.partition(":")
        assert any(line.startswith(path) and function in line for line in found), name


PLANTED: list[tuple[Rule, dict[str, str]]] = [
    (wrong_arrows, {"common/a.py": "import transfer.base"}),
    (wrong_arrows, {"common/a.py": "from deploy import node"}),
    (wrong_arrows, {"transfer/a.py": "from decode_node.scheduler import DecodeScheduler"}),
    (wrong_arrows, {"prefill_node/a.py": "import decode_node"}),
    (wrong_arrows, {"decode_node/a.py": "def f():\n    from prefill_node import peers"}),
    (wrong_arrows, {"decode_node/a.py": "import router.app"}),
    (wrong_arrows, {"prefill_node/a.py": "from deploy.cli import main"}),
    (wrong_arrows, {"router/a.py": "from transfer import base"}),
    (wrong_arrows, {"router/a/b.py": "from ...transfer import base"}),
    (wrong_arrows, {"deploy/a.py": "import tests.tiny_models"}),
    (wrong_arrows, {"prefill_node/__main__.py": "import decode_node"}),
    (impure_router, {"router/a.py": "from common.engine.loader import load_model"}),
    (impure_router, {"router/a.py": "from common import kv_cache"}),
    (impure_router, {"router/a.py": "import torch.nn"}),
    (
        impure_router,
        {"router/a.py": "from common.b import c", "common/b.py": "import common.node_io.sockets"},
    ),
    (stray_torch, {"common/a.py": "import torch"}),
    (stray_torch, {"common/kv_cache/manager.py": "from torch import Tensor"}),
    (stray_torch, {"deploy/a.py": "def f():\n    import torch.nn as nn"}),
    (stray_llguidance, {"common/engine/a.py": "import llguidance"}),
    (stray_llguidance, {"router/a.py": "from llguidance import LLMatcher"}),
    (stray_nixl, {"transfer/memory.py": "from nixl._api import nixl_agent"}),
    (stray_nixl, {"common/engine/a.py": "import nixl"}),
    (stray_triton, {"common/engine/attention/a.py": "import triton.language as tl"}),
    (stray_triton, {"common/engine/a.py": "def f():\n    from triton import jit"}),
    (impure_decisions, {"common/scheduler.py": "import time"}),
    (impure_decisions, {"decode_node/scheduler.py": "from time import monotonic"}),
    (impure_decisions, {"prefill_node/admission.py": "import zmq.asyncio"}),
    (impure_decisions, {"common/lifecycle.py": "def f():\n    print('here')"}),
    (
        impure_decisions,
        {"common/kv_cache/manager.py": "from common.b import c", "common/b.py": "import torch"},
    ),
    (
        modes_looked_at,
        {"common/a.py": "def f(mode):\n    return mode is DisaggregationMode.PREFILL"},
    ),
    (
        modes_looked_at,
        {"router/a.py": "match role:\n    case DisaggregationMode.DECODE:\n        pass"},
    ),
    (
        modes_looked_at,
        {"transfer/a.py": "x = role in (DisaggregationMode.DECODE, DisaggregationMode.PREFILL)"},
    ),
    (shapeless_names, {"common/utils.py": ""}),
    (shapeless_names, {"tests/unit/helpers.py": ""}),
    (too_long, {"router/a.py": LONG_FILE}),
    (too_long, {"router/a.py": LONG_FUNCTION}),
    (too_long, {"tests/a.py": "class A:\n    async " + LONG_FUNCTION.replace("\n", "\n    ")}),
]


@pytest.mark.parametrize(("rule", "files"), PLANTED)
def test_a_planted_violation_is_found(rule: Rule, files: dict[str, str]) -> None:
    sources = {path: Source(path, text) for path, text in files.items()}
    found = rule(sources)
    assert found
    assert any(line.startswith(path + ":") for line in found for path in files)


ALLOWED: list[tuple[Rule, dict[str, str]]] = [
    (wrong_arrows, {"deploy/a.py": "import decode_node, prefill_node, router, transfer, common"}),
    (wrong_arrows, {"prefill_node/__main__.py": "from deploy.cli import main"}),
    (wrong_arrows, {"tests/a.py": "import deploy.node, decode_node, prefill_node"}),
    (impure_router, {"router/a.py": "from common.messages import Generate"}),
    (stray_torch, {"common/engine/a.py": "import torch", "benchmarks/a.py": "import torch"}),
    (stray_torch, {"common/a.py": "import torchvision_is_another_module"}),
    (stray_nixl, {"transfer/nixl.py": "import nixl"}),
    (stray_triton, {"common/engine/kernels/a.py": "import triton.language as tl"}),
    (impure_decisions, {"common/event_loop.py": "import time"}),
    (modes_looked_at, {"deploy/node.py": "x = mode is DisaggregationMode.PREFILL"}),
    (modes_looked_at, {"common/a.py": "hello = Hello(role=DisaggregationMode.PREFILL)"}),
    (too_long, {"router/a.py": "x = 1\n" * 400 + "", "router/b.py": LONG_FUNCTION[:-10]}),
]


@pytest.mark.parametrize(("rule", "files"), ALLOWED)
def test_what_is_allowed_is_not_found(rule: Rule, files: dict[str, str]) -> None:
    assert rule({path: Source(path, text) for path, text in files.items()}) == []
