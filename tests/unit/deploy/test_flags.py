"""Flags become frozen settings, and every mistake is one line."""

import subprocess
import sys

import pytest

from common.config import DecodeConfig, PrefillConfig
from deploy.cli import COMMANDS, main
from deploy.config import ChatConfig, ClusterConfig, cpu_sets, parse_cpus
from deploy.errors import StartupError
from deploy.flags import parse_flags
from router.config import RouterConfig

SHARED = [
    "--model", "/m", "--served-model-name", "name", "--dtype", "float32", "--max-model-len", "64",
    "--page-size", "8", "--num-pages", "32", "--max-running-requests", "4", "--chunk-size", "128",
    "--host", "0.0.0.0", "--port", "9000",
]  # fmt: skip


@pytest.mark.parametrize("settings", [PrefillConfig, DecodeConfig, ClusterConfig])
def test_nodes_and_cluster_take_the_flags_that_scripts_rely_on(
    settings: type[PrefillConfig | DecodeConfig | ClusterConfig],
) -> None:
    config = parse_flags(settings, "pdserve", SHARED)
    assert (config.model, config.served_model_name, config.dtype) == ("/m", "name", "float32")
    assert (config.max_model_len, config.page_size, config.num_pages) == (64, 8, 32)
    assert (config.max_running_requests, config.chunk_size) == (4, 128)
    assert (config.host, config.port) == ("0.0.0.0", 9000)


@pytest.mark.parametrize(
    "args",
    [
        ["--router", "tcp://a:1", "tcp://b:2"],
        ["--router", "tcp://a:1", "--router", "tcp://b:2"],
        ["--router=tcp://a:1", "--page-size", "8", "--router=tcp://b:2"],
        ["--router", "tcp://a:1", "--page-size=8", "--router", "tcp://b:2"],
    ],
)
def test_a_list_flag_is_a_list_or_repeated(args: list[str]) -> None:
    config = parse_flags(PrefillConfig, "pdserve prefill", args)
    assert config.router == ("tcp://a:1", "tcp://b:2")


def test_ports_default_to_what_users_expect() -> None:
    assert parse_flags(RouterConfig, "pdserve router", []).port == 8000
    assert parse_flags(ClusterConfig, "pdserve cluster", []).port == 8000


def test_cluster_takes_its_own_flags() -> None:
    args = [
        "--prefill", "2", "--decode", "3", "--prefill-args", "--kv-cache-gib 2", "--decode-args",
        "--ucx-tls tcp", "--cpus-prefill", "0;1", "--cpus-decode", "2-3", "--no-restart",
    ]  # fmt: skip
    config = parse_flags(ClusterConfig, "pdserve cluster", args)
    assert (config.prefill, config.decode, config.restart) == (2, 3, False)
    assert (config.prefill_args, config.decode_args) == ("--kv-cache-gib 2", "--ucx-tls tcp")
    assert parse_flags(ClusterConfig, "x", ["--ask", "a b", "--decode-args=--port 1"]).ask == "a b"
    assert cpu_sets(config.cpus_prefill) == ["0", "1"]
    assert cpu_sets(config.cpus_decode) == ["2-3"]


MISTAKES: list[tuple[type, list[str], str]] = [
    (PrefillConfig, ["--page-size", "x"], "--page-size"),
    (PrefillConfig, ["--page-size", "0"], "page_size must be positive, not 0"),
    (
        DecodeConfig,
        ["--unproven-s", "5"],
        "unproven_s must be at least lease_s + longest_post_s + tcp_timeout_s, 23",
    ),
    (DecodeConfig, ["--stopped-peer-s", "30"], "stopped_peer_s must be at least unproven_s, 60"),
    (PrefillConfig, ["--dtype", "float8"], "float8"),
    (PrefillConfig, ["--router", "a:1"], "router must look like tcp://host:port"),
    (DecodeConfig, ["--pagesize", "8"], "--pagesize, 8 (perhaps --page-size?)"),
    (DecodeConfig, ["--num-pages"], "--num-pages"),
    (RouterConfig, ["--port", "70000"], "port must be in"),
    (ClusterConfig, ["--prefill", "-1"], "prefill must not be negative"),
    (ClusterConfig, ["--port", "-1"], "port must be in"),
    (ClusterConfig, ["--prefill-args", "'open"], "prefill_args cannot be split"),
    (ClusterConfig, ["--prefill", "3", "--cpus-prefill", "0;1"], "2 sets for 3 nodes"),
    (ClusterConfig, ["--cpus-decode", "a"], "processors look like"),
    (ChatConfig, ["--url", "localhost"], "url must look like"),
]


@pytest.mark.parametrize(("settings", "args", "message"), MISTAKES)
def test_a_mistake_is_one_line_that_names_it(
    settings: type, args: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StartupError) as caught:
        parse_flags(settings, "pdserve", args)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_the_command_line_prints_the_line_and_returns_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", "--page-size", "0"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("pdserve decode: ")
    assert printed.err.count("\n") == 1


def test_an_unknown_command_names_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    printed = capsys.readouterr().err
    assert all(name in printed for name in COMMANDS)
    assert printed.count("\n") == 1


@pytest.mark.parametrize("args", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_answers_without_loading_torch(args: list[str]) -> None:
    code = (
        "import sys\nfrom deploy.cli import main\n"
        f"try:\n    code = main({args!r})\nexcept SystemExit as end:\n    code = end.code\n"
        "assert not code\nassert not {'torch', 'transformers', 'nixl'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: pdserve" in done.stdout


@pytest.mark.parametrize("module", ["prefill_node", "decode_node", "router", "deploy.cli"])
def test_modules_are_the_same_command_line(module: str) -> None:
    args = [sys.executable, "-m", module, *(["router"] if module == "deploy.cli" else [])]
    done = subprocess.run([*args, "--nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("pdserve ")
    assert "--nonsense" in done.stderr


@pytest.mark.parametrize(
    ("text", "processors"), [("0", {0}), ("0,2-3", {0, 2, 3}), (" 1 , 1", {1}), ("5-5", {5})]
)
def test_processor_sets(text: str, processors: set[int]) -> None:
    assert parse_cpus(text) == processors


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-2", "1,,2", "0;1"])
def test_what_is_no_processor_set(text: str) -> None:
    with pytest.raises(ValueError, match="processors"):
        parse_cpus(text)
