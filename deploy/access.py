"""Where secrets come from, and the rule that nothing listens beyond the loopback without one.

Files or environment variables, never arguments: those are in every process list. What is read here
goes on as `Secret`, `ClusterKeys` and `KeyRing`, none of which shows itself.
"""

import secrets
from collections.abc import Mapping

from common.config import NodeConfig
from common.credentials import (
    ClusterKeys,
    KeyRing,
    Secret,
    UnusableSecret,
    read_keys,
    read_secret,
)
from common.loopback import is_loopback
from deploy.errors import StartupError
from router.access import Access
from router.config import RouterConfig

SECRET_VARIABLE = "PDSERVE_SECRET"
API_KEYS_VARIABLE = "PDSERVE_API_KEYS"
ADMIN_KEYS_VARIABLE = "PDSERVE_ADMIN_KEYS"
CLIENT_KEY_VARIABLE = "PDSERVE_API_KEY"

Environ = Mapping[str, str]

_HOW_SECRET = f"give --secret-file or {SECRET_VARIABLE}, or insist with --allow-insecure-bind"
_HOW_KEYS = f"give --api-key-file or {API_KEYS_VARIABLE}, or insist with --allow-insecure-bind"


def cluster_secret(path: str | None, environ: Environ) -> Secret | None:
    """The secret that all processes of a cluster share. Raises StartupError."""
    try:
        return read_secret(path, environ, SECRET_VARIABLE, "the cluster secret")
    except UnusableSecret as error:
        raise StartupError(str(error)) from None


def random_secret() -> Secret:
    """A secret for a cluster that nobody else joins."""
    return Secret(secrets.token_urlsafe(32))


def node_keys(config: NodeConfig, environ: Environ) -> ClusterKeys | None:
    """What a node proves itself with.

    Raises:
        StartupError: an unusable secret, or none and an address beyond the loopback.
    """
    secret = cluster_secret(config.secret_file, environ)
    if secret is None and not config.allow_insecure_bind and not is_loopback(config.host):
        raise StartupError(
            f"host: {config.host} is reached from other machines, which needs a cluster secret: "
            + _HOW_SECRET
        )
    return None if secret is None else ClusterKeys.derive(secret)


def node_key(path: str | None, environ: Environ) -> Secret:
    """The bearer token that nodes beyond the loopback want to see. Raises StartupError."""
    secret = cluster_secret(path, environ)
    if secret is None:
        raise StartupError(f"there is no cluster secret: give --secret-file or {SECRET_VARIABLE}")
    return ClusterKeys.derive(secret).node_key


def router_access(config: RouterConfig, environ: Environ) -> Access:
    """Who may enter a router.

    Raises:
        StartupError: an unusable secret or key, or none and an address beyond the loopback.
    """
    secret = cluster_secret(config.secret_file, environ)
    api = client_keys(config.api_key_file, environ)
    admin = _keys(config.admin_key_file, environ, ADMIN_KEYS_VARIABLE, "admin key")
    if not config.allow_insecure_bind:
        if secret is None and not is_loopback(config.node_host):
            raise StartupError(
                f"node_host: {config.node_host} is reached from other machines, which needs a "
                f"cluster secret: {_HOW_SECRET}"
            )
        if not api and not is_loopback(config.host):
            raise StartupError(
                f"host: {config.host} is reached from other machines, which needs API keys: "
                + _HOW_KEYS
            )
    keys = None if secret is None else ClusterKeys.derive(secret)
    return Access(keys, KeyRing(api), KeyRing(admin))


def client_keys(path: str | None, environ: Environ) -> tuple[Secret, ...]:
    """The keys that a router takes from its clients. Raises StartupError."""
    return _keys(path, environ, API_KEYS_VARIABLE, "API key")


def own_key(environ: Environ) -> Secret | None:
    """The key that a client of ours shows, if it has one. Raises StartupError."""
    found = _keys(None, environ, CLIENT_KEY_VARIABLE, "API key")
    return found[0] if found else next(iter(client_keys(None, environ)), None)


def _keys(path: str | None, environ: Environ, variable: str, what: str) -> tuple[Secret, ...]:
    try:
        return read_keys(path, environ, variable, what)
    except UnusableSecret as error:
        raise StartupError(str(error)) from None
