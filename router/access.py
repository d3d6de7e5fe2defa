"""Who may ask the router for what: API keys, admin keys, and the paths that need neither.

    open     health, liveness, metrics: for probes and scrapers, which hold no key
    admin    verbs that act on other people's requests or on the whole cluster
    user     everything else, also what does not exist

A request is judged by its path and its `Authorization` header alone, before anything of its body is
read. Where no key is configured a door stands open; the bind rules (`deploy/access.py`) see to it
that this happens on the loopback only, unless somebody insists.
"""

from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from common.credentials import ClusterKeys, KeyRing
from router.errors import forbidden, unauthorized

ADMIN_PATHS = frozenset(
    {
        "/pause_generation",
        "/continue_generation",
        "/abort_request",
        "/flush_cache",
        "/drain",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
OPEN_PATHS = frozenset({"/live", "/metrics"})
OPEN_PREFIX = "/health"


@dataclass(frozen=True, slots=True)
class Access:
    """What a router was given to know its cluster and its clients by."""

    keys: ClusterKeys | None = None
    """Of the cluster secret; None lets every node in."""
    api: KeyRing = field(default_factory=KeyRing)
    """Empty: every client may ask."""
    admin: KeyRing = field(default_factory=KeyRing)
    """Empty: who may ask may also administer."""


def demand_keys(access: Access) -> Middleware:
    """Middleware: 401 for who shows no key of ours, 403 for a client's key on an admin's path."""
    anybody = access.api + access.admin
    admins = access.admin or access.api

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return await handler(request)
        header = request.headers.get("Authorization")
        if path in ADMIN_PATHS:
            if admins and not admins.admits(header):
                raise forbidden() if access.api.admits(header) else unauthorized()
        elif access.api and not anybody.admits(header):
            raise unauthorized()
        return await handler(request)

    return middleware
