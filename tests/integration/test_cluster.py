"""`pdserve cluster` as its user meets it: it starts, answers, survives, says why, and ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster_fixture import ROOT, Cluster, cluster
from tests.tiny_models import make_tiny_model

PROMPT = {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model("llama", folder, seed=1)
    return folder


def complete(running: Cluster) -> str:
    answer = running.post("/v1/completions", {"model": "tiny", **PROMPT})
    assert answer["usage"]["completion_tokens"] == PROMPT["max_tokens"]
    return str(answer["choices"][0]["text"])


def alive(pids: list[int]) -> list[int]:
    procs = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, remaining = psutil.wait_procs(procs, timeout=5)
    return [process.pid for process in remaining]


def test_a_cluster_answers_survives_the_death_of_a_node_and_ends_on_ctrl_c(model: Path) -> None:
    with cluster(model) as running:
        assert [(n.name, n.role) for n in running.nodes()] == [
            ("decode-0", "decode"),
            ("prefill-0", "prefill"),
        ]
        undisturbed = complete(running)
        running.wait_until_idle()
        for name in ("decode-0", "prefill-0"):
            dead = running.kill(name)
            running.wait_until(
                lambda dead=dead: (
                    len(running.nodes()) == 2  # type: ignore[misc]
                    and dead not in [node.pid for node in running.nodes()]
                ),
                f"{name} is back",
            )
            assert complete(running) == undisturbed
        assert "decode-0] was ended by SIGKILL; starting it again" in running.log()

        pids = running.pids()
        assert len(pids) == 4
        assert running.interrupt() == 0
        assert alive(pids) == []
        assert running.process.stdout is not None
        assert running.process.stdout.read() == "", "READY is the only line on stdout"
        assert "Traceback" not in running.log()


def test_without_restart_a_dead_node_stays_away(model: Path) -> None:
    with cluster(model, decode=2, restart=False) as running:
        assert len(running.nodes()) == 3
        running.kill("decode-0")
        running.wait_until(lambda: len(running.nodes("decode")) == 1, "the dead node was dropped")
        complete(running)
        assert "decode-0] was ended by SIGKILL; it stays away" in running.log()


def test_children_die_with_a_supervisor_that_is_killed(model: Path) -> None:
    with cluster(model) as running:
        pids = running.pids()
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait(5)
        assert alive(pids) == []


def test_a_first_question_is_answered_on_stdout(model: Path) -> None:
    with cluster(model, ask="How many tokens?") as running:
        assert running.process.stdout is not None
        assert running.process.stdout.readline() == "> How many tokens?\n"


def run_cluster(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", "cluster", "--port", "0", *args]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_model_that_does_not_exist_is_one_line() -> None:
    done = run_cluster("--model", "/no/such/model")
    assert done.returncode == 2
    assert done.stderr == "pdserve cluster: model: no folder /no/such/model\n"
    assert done.stdout == ""


def test_a_child_that_dies_at_start_shows_why(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHead"]}))
    done = run_cluster("--model", str(broken))
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr[done.stderr.rindex("[cluster]") :]
    assert "ended with exit code 2 at start; the last it said:" in last
    assert "GPT2LMHead is not supported; supported: LlamaForCausalLM" in last


def test_a_port_that_is_taken_is_named_and_its_owner_is_not_disturbed(model: Path) -> None:
    with cluster(model) as running:
        port = running.url.rpartition(":")[2]
        done = run_cluster("--model", str(model), "--num-pages", "16", "--port", port)
        assert done.returncode == 2
        assert done.stderr.startswith(f"pdserve cluster: cannot listen on 127.0.0.1:{port}: ")
        assert done.stderr.count("\n") == 1
        assert len(running.nodes()) == 2
        complete(running)
