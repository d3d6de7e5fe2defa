"""What needs a secret at start, and where it is taken from."""

from pathlib import Path

import pytest

from common.config import DecodeConfig, PrefillConfig
from common.credentials import ClusterKeys, Secret
from common.loopback import is_loopback
from deploy.access import node_key, node_keys, own_key, router_access
from deploy.errors import StartupError
from router.config import RouterConfig

SECRET = {"PDSERVE_SECRET": "a secret of many letters"}
KEYS = {"PDSERVE_API_KEYS": "an-api-key-of-ours"}


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.8.0.3", True), ("::1", True), ("[::1]", True),
        ("localhost", True), ("0.0.0.0", False), ("::", False), ("", False), ("*", False),
        ("10.0.0.1", False), ("fe80::1", False), ("192.0.2.7", False),
    ],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_on_the_loopback_nothing_is_needed() -> None:
    assert node_keys(PrefillConfig(), {}) is None
    access = router_access(RouterConfig(), {})
    assert access.keys is None
    assert not access.api
    assert not access.admin


@pytest.mark.parametrize("config", [PrefillConfig(host="0.0.0.0"), DecodeConfig(host="10.1.1.1")])
def test_a_node_for_other_machines_needs_the_secret(config: PrefillConfig | DecodeConfig) -> None:
    with pytest.raises(StartupError, match=r"host: .* cluster secret: give --secret-file or PDS"):
        node_keys(config, KEYS)
    expected = ClusterKeys.derive(Secret(SECRET["PDSERVE_SECRET"]))
    assert node_keys(config, SECRET) == expected
    assert node_keys(PrefillConfig(host="0.0.0.0", allow_insecure_bind=True), {}) is None
    assert node_key(None, SECRET) == expected.node_key


@pytest.mark.parametrize(
    ("config", "environ", "needed"),
    [
        (RouterConfig(node_host="0.0.0.0"), KEYS, "node_host: .* cluster secret"),
        (RouterConfig(host="0.0.0.0"), SECRET, "^host: .* API keys"),
        (RouterConfig(host="::", node_host="::"), {}, "node_host: .* cluster secret"),
        (RouterConfig(host="::", node_host="::"), SECRET | KEYS, None),
        (RouterConfig(host="::", node_host="::", allow_insecure_bind=True), {}, None),
    ],
)
def test_a_router_for_other_machines_needs_what_each_port_is_for(
    config: RouterConfig, environ: dict[str, str], needed: str | None
) -> None:
    if needed is None:
        router_access(config, environ)
        return
    with pytest.raises(StartupError, match=needed):
        router_access(config, environ)


def test_what_is_unusable_is_a_line_that_quotes_nothing(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cluster secret in PDSERVE_SECRET must have") as caught:
        node_keys(PrefillConfig(), {"PDSERVE_SECRET": "tiny"})
    assert "tiny" not in str(caught.value)
    with pytest.raises(StartupError, match="cannot read /nowhere/secret"):
        router_access(RouterConfig(secret_file="/nowhere/secret"), {})
    file = tmp_path / "keys"
    file.write_text("short\n")
    with pytest.raises(StartupError, match=r"admin key in .*keys must have") as caught:
        router_access(RouterConfig(admin_key_file=str(file)), {})
    assert "short" not in str(caught.value)
    with pytest.raises(StartupError, match="there is no cluster secret"):
        node_key(None, {})


def test_our_own_client_shows_its_key_or_the_servers_first() -> None:
    mine = {"PDSERVE_API_KEY": "the-key-of-a-client"}
    assert own_key({}) is None
    assert own_key(KEYS) == Secret("an-api-key-of-ours")
    assert own_key(KEYS | mine) == Secret("the-key-of-a-client")
