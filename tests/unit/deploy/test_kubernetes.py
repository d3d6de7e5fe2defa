"""The Kubernetes manifests are consistent, and every container's arguments are ones we accept."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import DecodeConfig, NodeConfig, PrefillConfig
from common.drain import DRAIN_GRACE_S
from deploy.access import node_keys, router_access
from deploy.flags import parse_flags
from router.config import RouterConfig

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
SETTINGS: dict[str, type] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
PROCESS_END_S = 15.0
"""Sockets' last words, the transfer's end and the interpreter's, generously."""


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    return [one for path in sorted(FOLDER.glob("*.yaml")) for one in load(path)]


def load(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


def pod_of(objects: list[dict[str, Any]], role: str) -> dict[str, Any]:
    (found,) = (
        one for one in of_kind(objects, "Deployment") if one["metadata"]["labels"]["role"] == role
    )
    pod: dict[str, Any] = found["spec"]["template"]
    return pod


def container_of(objects: list[dict[str, Any]], role: str) -> dict[str, Any]:
    (container,) = pod_of(objects, role)["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def config_of(objects: list[dict[str, Any]], role: str) -> Any:
    command, *args = container_of(objects, role)["args"]
    assert command == role
    return parse_flags(SETTINGS[role], role, args)


def ports_of(objects: list[dict[str, Any]], role: str) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container_of(objects, role)["ports"]}


def test_selectors_find_the_pods_they_are_meant_for(objects: list[dict[str, Any]]) -> None:
    labels = {role: pod_of(objects, role)["metadata"]["labels"] for role in SETTINGS}
    assert len({str(label) for label in labels.values()}) == 3
    for one in objects:
        selector = one["spec"]["selector"]
        role = one["metadata"]["labels"]["role"]
        assert selector.get("matchLabels", selector) == labels[role], one["metadata"]["name"]


@pytest.mark.parametrize("role", SETTINGS)
def test_ports_are_where_the_flags_say(objects: list[dict[str, Any]], role: str) -> None:
    config = config_of(objects, role)
    wanted = {"http": config.port}
    if role == "router":
        wanted["nodes"] = config.node_port
    if role == "prefill":
        wanted["side-channel"] = config.side_channel_port
    assert ports_of(objects, role) == wanted


def test_nodes_dial_a_service_that_names_routers_before_they_are_ready(
    objects: list[dict[str, Any]],
) -> None:
    """A router is ready only once nodes have joined it."""
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "Service")}
    for role in ("prefill", "decode"):
        (address,) = config_of(objects, role).router
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        service = services[host]
        assert service["publishNotReadyAddresses"] is True
        assert service["clusterIP"] == "None"
        assert [p["port"] for p in service["ports"]] == [int(port)]
    for service in services.values():
        for port in service["ports"]:
            assert port["targetPort"] in ports_of(objects, "router")


@pytest.mark.parametrize("role", SETTINGS)
def test_a_pod_is_given_the_time_to_drain(objects: list[dict[str, Any]], role: str) -> None:
    config = config_of(objects, role)
    needed = config.drain_s + PROCESS_END_S
    if isinstance(config, NodeConfig):
        needed += config.longest_post_s + DRAIN_GRACE_S
    hook = container_of(objects, role).get("lifecycle", {}).get("preStop", {})
    if hook:
        command, seconds = hook["exec"]["command"]
        assert command == "sleep"
        needed += float(seconds)
    assert pod_of(objects, role)["spec"]["terminationGracePeriodSeconds"] >= needed


@pytest.mark.parametrize("role", SETTINGS)
def test_probes_ask_what_they_are_for(objects: list[dict[str, Any]], role: str) -> None:
    container = container_of(objects, role)
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in PROBES}
    assert {name: get["path"] for name, get in probes.items()} == {
        **PROBES,
        "liveness": "/health/live" if role == "router" else "/health",
    }
    assert {get["port"] for get in probes.values()} == {"http"}


PROBES = {"startup": "/health/live", "liveness": "/health/live", "readiness": "/health/ready"}


@pytest.mark.parametrize("role", SETTINGS)
def test_secrets_are_mounted_where_the_flags_look(objects: list[dict[str, Any]], role: str) -> None:
    config = config_of(objects, role)
    mounts = {m["name"]: m["mountPath"] for m in container_of(objects, role)["volumeMounts"]}
    volumes = {v["name"]: v for v in pod_of(objects, role)["spec"]["volumes"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["secrets"]["secret"]["secretName"] == "pdserve"
    files = [config.secret_file] + ([config.api_key_file] if role == "router" else [])
    assert {str(Path(file).parent) for file in files} == {mounts["secrets"]}
    recipe = (FOLDER / "router.yaml").read_text()
    assert all(f"--from-literal={Path(file).name}=" in recipe for file in files)


@pytest.mark.parametrize("role", SETTINGS)
def test_the_bind_rules_are_met(objects: list[dict[str, Any]], role: str, tmp_path: Path) -> None:
    """With those files there, a process listens beyond the loopback without being told twice."""
    (tmp_path / "key").write_text("0123456789abcdef0123456789abcdef\n")
    args = [
        f"{flag}={tmp_path / 'key'}" if flag.endswith("-file") else arg
        for arg in container_of(objects, role)["args"][1:]
        for flag in (arg.partition("=")[0],)
    ]
    config: Any = parse_flags(SETTINGS[role], role, args)
    if isinstance(config, RouterConfig):
        assert router_access(config, {}).api
    else:
        assert node_keys(config, {}) is not None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nodes_are_named_after_their_pods(objects: list[dict[str, Any]], role: str) -> None:
    environment = {one["name"]: one for one in container_of(objects, role)["env"]}
    field = environment["POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert (config_of(objects, role).name, field) == ("$(POD_NAME)", "metadata.name")
