"""Composition of a node: which half it becomes, and the settings it refuses."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.config import DecodeConfig, PrefillConfig
from common.messages import WIRE_VERSION, Fingerprint
from common.modes import DisaggregationMode
from common.node_io.peer_dialler import PeerDialler
from common.node_io.peer_server import PeerServer
from common.settings import SchedulerSettings
from decode_node.scheduler import DecodeScheduler
from deploy.engine import choose_max_model_len, parse_params
from deploy.errors import StartupError
from deploy.node import select_half
from prefill_node.scheduler import PrefillScheduler
from tests.tiny_models import MAX_POSITIONS, make_tiny_model

ROOT = Path(__file__).parents[3]


class Pages:
    """As much of a page pool as a scheduler's construction asks for."""

    head_bytes = 1024


def scheduler_settings() -> SchedulerSettings:
    agreed = Fingerprint(
        wire_version=WIRE_VERSION, model="m", dtype="float32", num_layers=1, num_kv_heads=1,
        head_dim=2, page_size=16,
    )  # fmt: skip
    return SchedulerSettings(
        incarnation="i", fingerprint=agreed, num_pages=8, page_size=16, vocab_size=10,
        max_model_len=64, max_running_requests=2, chunk_size=16,
    )  # fmt: skip


def test_prefill_mode_makes_a_prefill_scheduler_that_is_dialled() -> None:
    half = select_half(DisaggregationMode.PREFILL, PrefillConfig())
    scheduler = half.make_scheduler(scheduler_settings(), Pages())  # type: ignore[arg-type]
    assert type(scheduler) is PrefillScheduler
    assert isinstance(half.peers, PeerServer)


def test_decode_mode_makes_a_decode_scheduler_that_dials() -> None:
    half = select_half(DisaggregationMode.DECODE, DecodeConfig())
    scheduler = half.make_scheduler(scheduler_settings(), Pages())  # type: ignore[arg-type]
    assert type(scheduler) is DecodeScheduler
    assert isinstance(half.peers, PeerDialler)


def test_the_length_is_the_models_own_or_shorter() -> None:
    assert choose_max_model_len(None, 512) == 512
    assert choose_max_model_len(64, 512) == 64
    with pytest.raises(StartupError, match="max_model_len: 513 is more than the model's 512"):
        choose_max_model_len(513, 512)


def test_nixl_parameters() -> None:
    assert parse_params(["num_workers=2", "engine_config=a=b"]) == {
        "num_workers": "2",
        "engine_config": "a=b",
    }
    with pytest.raises(StartupError, match="'num_workers' is not key=value"):
        parse_params(["num_workers"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model("llama", folder, seed=1)
    return folder


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-model-len", str(MAX_POSITIONS + 1)], "max_model_len"),
        (["--kv-cache-gib", "0.0000001"], "the page pool: "),
        (["--device", "cuda:99"], "device: cuda:99"),
        (["--device", "gpu"], "device must be cpu, cuda, cuda:N or auto, not 'gpu'"),
        (["--device", "cpu", "--attention", "triton"], "attention: triton, but "),
        (["--mem-fraction", "1.5"], "mem_fraction must be in (0, 1], not 1.5"),
        (["--cuda-graph-sizes", "8", "0"], "cuda_graph_sizes must be positive, not 0"),
        (["--cpus", "4095"], "cpus: 4095 is not among"),
        (["--nixl-params", "nonsense"], "nixl_params: 'nonsense' is not key=value"),
        (["--host", "192.0.2.1"], "which needs a cluster secret: give --secret-file"),
        (["--host", "192.0.2.1", "--allow-insecure-bind"], "cannot listen at 192.0.2.1"),
    ],
)
def test_what_a_node_cannot_have_is_one_line_at_the_end(
    model: Path, args: list[str], message: str
) -> None:
    command = [sys.executable, "-m", "prefill_node", "--model", str(model), "--num-pages", "16"]
    if "--kv-cache-gib" in args:
        command = command[:-2]
    done = subprocess.run(
        [*command, *args], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("pdserve prefill: ")
    assert message in done.stderr.splitlines()[-1]


CPU_ONLY = """
import sys

import torch

from common.config import DecodeConfig
from common.modes import DisaggregationMode
from common.node_io.thread import NodeIO
from deploy.node import run_node

announce = NodeIO.announce


def look(io: NodeIO, registration: object) -> None:
    announce(io, registration)
    imported = [name for name in sys.modules if name.split(".")[0] == "triton"]
    ours = [name for name in sys.modules if name.startswith("common.engine.kernels.")]
    print("imported", imported + ours, "initialised", torch.cuda.is_initialized())
    io.ask_to_end()


NodeIO.announce = look
config = DecodeConfig(model=sys.argv[1], num_pages=16, device=sys.argv[2])
sys.exit(run_node(DisaggregationMode.DECODE, config))
"""


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_node_on_a_cpu_has_nothing_of_a_gpu(model: Path, device: str) -> None:
    """Everything `deploy/node.py` composes is there, warmed up, when the node announces itself."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", CPU_ONLY, str(model), device],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported [] initialised False"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_node_cleanly_also_without_a_router(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    args = ["--model", str(model), "--num-pages", "16", "--router", "tcp://127.0.0.1:9"]
    log = tmp_path / "log"
    with log.open("w") as sink:
        node = subprocess.Popen([sys.executable, "-m", "decode_node", *args], cwd=ROOT, stderr=sink)
        try:
            until = time.monotonic() + 60
            while "ready after" not in log.read_text() and time.monotonic() < until:
                time.sleep(0.05)
            os.kill(node.pid, number)
            assert node.wait(20) == 0, log.read_text()
        finally:
            node.kill()
            node.wait()
    assert "Traceback" not in log.read_text()
