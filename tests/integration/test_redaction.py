"""Nothing that a cluster writes, answers or shows in the process list holds a secret or a key."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import zmq

from common.credentials import ClusterKeys, Secret
from common.gatekeeper import dial_with
from tests.cluster_fixture import ROOT, Cluster, cluster
from tests.tiny_models import make_tiny_model

SECRET, KEY, ADMIN = "cluster-secret-4f1d93", "api-key-of-a-client-77ab", "admin-key-of-ours-c0de"
WRONG_KEY, WRONG_SECRET = "a-wrong-key-0123456789", "a-wrong-secret-987654"
ENVIRONMENT = {"PDSERVE_SECRET": SECRET, "PDSERVE_API_KEYS": KEY, "PDSERVE_ADMIN_KEYS": ADMIN}


def hidden() -> list[str]:
    derived = ClusterKeys.derive(Secret(SECRET))
    parts = [derived.curve_public.decode(), derived.curve_secret.decode()]
    return [SECRET, KEY, ADMIN, WRONG_KEY, WRONG_SECRET, derived.node_key.reveal(), *parts]


def ask(url: str, key: str | None, body: object = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode() + str(error.headers)


def knock(c: Cluster) -> None:
    """A node with another secret at the router's door, until the log tells of it."""
    found = re.search(r"nodes on (tcp://[\d.:]+)", c.log())
    assert found
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dial_with(dealer, ClusterKeys.derive(Secret(WRONG_SECRET)))
    dealer.connect(found[1])
    try:
        c.wait_until(lambda: "refused_connections" in c.log(), "a line about the refusal")
    finally:
        dealer.close()
        context.term()


def session(c: Cluster) -> list[str]:
    """Requests with right and wrong keys; all that was answered."""
    prompt = {"prompt": [40, 41, 42], "max_tokens": 4, "ignore_eos": True}
    answers = []
    for path, key, body, expected in (
        ("/v1/completions", KEY, prompt, 200),
        ("/v1/completions", WRONG_KEY, prompt, 401),
        ("/v1/completions", None, prompt, 401),
        ("/v1/completions", KEY, {"prompt": KEY, "max_tokens": -1}, 400),
        ("/flush_cache", KEY, {}, 403),
        ("/flush_cache", ADMIN, {}, 200),
        ("/get_server_info", KEY, None, 200),
        ("/v1/models", KEY, None, 200),
        ("/metrics", None, None, 200),
    ):
        status, text = ask(c.url + path, key, body)
        assert status == expected, (path, text)
        answers.append(text)
    nodes = json.loads(ask(c.url + "/get_server_info", KEY)[1])["nodes"]
    assert len(nodes) == 2
    for node in nodes:
        answers += [ask(node["url"] + path, None)[1] for path in ("/server_info", "/metrics")]
    return answers


@pytest.mark.timeout(240)
def test_a_session_with_right_and_wrong_keys_shows_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    model = make_tiny_model("llama", tmp_path / "tiny", seed=1)
    with cluster(model, router_args="--log-level debug") as c:
        answers = session(c)
        knock(c)
        commands = [" ".join(psutil.Process(pid).cmdline()) for pid in c.pids()]
        assert len(commands) == 4
        everything = [*answers, *commands, c.log()]
    for secret in hidden():
        assert not [text for text in everything if secret in text]


@pytest.mark.parametrize("command", ["router", "decode", "cluster", "chat", "node-key"])
def test_help_shows_no_secret_that_the_environment_holds(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", command, "--help"],
        cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not [secret for secret in hidden() if secret in done.stdout + done.stderr]
