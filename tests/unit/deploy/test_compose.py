"""The compose file is valid, and every service's command line is one that we accept."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import DecodeConfig, PrefillConfig
from deploy.access import node_keys, router_access
from deploy.flags import parse_flags
from router.config import RouterConfig

DEPLOY = Path(__file__).parents[3] / "deploy"
SETTINGS: dict[str, type] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    text = (DEPLOY / "compose.yaml").read_text()
    defaults = re.sub(r"\$\{\w+:[-?]([^}]*)\}", r"\1", text)
    loaded: dict[str, Any] = yaml.safe_load(defaults)
    return loaded


@pytest.mark.parametrize("service", SETTINGS)
def test_the_command_of_a_service_is_accepted(compose: dict[str, Any], service: str) -> None:
    command, *args = compose["services"][service]["command"]
    assert command == service
    parse_flags(SETTINGS[service], service, args)


def test_nodes_dial_the_router_where_it_listens(compose: dict[str, Any]) -> None:
    services = compose["services"]
    router = parse_flags(RouterConfig, "", services["router"]["command"][1:])
    assert (router.host, router.node_host) == ("0.0.0.0", "0.0.0.0")
    for role in ("prefill", "decode"):
        node = parse_flags(PrefillConfig, "", services[role]["command"][1:])
        assert node.router == (f"tcp://router:{router.node_port}",)
        assert "router" in services[role]["depends_on"]
        health = services[role]["healthcheck"]["test"][-1]
        assert f":{node.port}/health/ready'" in health
    assert services["router"]["ports"] == [f"8000:{router.port}"]


@pytest.mark.parametrize("service", SETTINGS)
def test_a_container_is_given_the_time_to_drain(compose: dict[str, Any], service: str) -> None:
    described = compose["services"][service]
    config: Any = parse_flags(SETTINGS[service], service, described["command"][1:])
    grace_s = float(described["stop_grace_period"].removesuffix("s"))
    assert grace_s >= config.drain_s + 20.0


@pytest.mark.parametrize("service", SETTINGS)
def test_the_bind_rules_are_met(compose: dict[str, Any], service: str) -> None:
    described = compose["services"][service]
    config: Any = parse_flags(SETTINGS[service], service, described["command"][1:])
    given = dict.fromkeys(described["environment"], "0123456789abcdef0123456789abcdef")
    if isinstance(config, RouterConfig):
        assert router_access(config, given).api
    else:
        assert node_keys(config, given) is not None


def test_every_service_is_built_from_the_dockerfile_and_shares_the_models(
    compose: dict[str, Any],
) -> None:
    for service in compose["services"].values():
        root = (DEPLOY / service["build"]["context"]).resolve()
        assert root == DEPLOY.parent
        assert (root / service["build"]["dockerfile"]).is_file()
        (volume,) = service["volumes"]
        assert volume.partition(":")[0] in compose["volumes"]


def test_the_dockerfile_copies_every_package_that_is_installed() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in shlex.split(line)[1:-1]}
    packages = {path.parent.name for path in DEPLOY.parent.glob("*/__init__.py")}
    assert copied >= packages - {"tests", "benchmarks"}
    assert {"pyproject.toml", "README.md", "LICENSE"} <= copied
