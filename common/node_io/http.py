"""A node's own HTTP: is it well, what does it do, and the admin verbs for this node alone."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from common.adapter_names import name_problem, path_problem
from common.credentials import KeyRing
from common.http_log import HTTPLog
from common.messages import (
    AbortRequests,
    AdapterInfo,
    AdminVerb,
    Continue,
    Drain,
    Fingerprint,
    FlushCache,
    Incarnation,
    LoadAdapter,
    NodeStats,
    Pause,
    UnloadAdapter,
)
from common.metrics import CONTENT_TYPE
from common.modes import DisaggregationMode, PauseMode
from common.node_io.admin import AdminDesk
from common.node_io.settings import CannotBind, IOSettings

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 10
SHUTDOWN_S = 0.5


class PauseBody(msgspec.Struct):
    mode: PauseMode = PauseMode.ABORT


class AbortBody(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


class LoadBody(msgspec.Struct):
    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadBody(msgspec.Struct):
    lora_name: str


class NoBody(msgspec.Struct):
    pass


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `/server_info` says."""

    name: str
    role: DisaggregationMode
    incarnation: Incarnation
    pid: int
    state: str
    """`starting`, then the scheduler's state."""
    served_model_name: str
    fingerprint: Fingerprint | None
    max_model_len: int
    url: str
    side_channel: str
    routers: dict[str, Incarnation | None]
    """Address -> the incarnation linked there."""
    peers: list[Incarnation]
    adapters: list[AdapterInfo]
    step_age_s: float
    stats: NodeStats
    counters: dict[str, int]
    """Of the I/O thread; the scheduler's are in `stats`."""


@dataclass(frozen=True, slots=True)
class Views:
    """Where the handlers get their answers; all are called in the loop."""

    problem: Callable[[], str | None]
    """Why this node is not healthy, or None."""
    unready: Callable[[], str | None]
    """Why no router should give it work, or None."""
    metrics: Callable[[], bytes]
    info: Callable[[], ServerInfo]


class BadRequest(Exception):
    """The body is not what the verb takes; `param` names the field if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def error_response(
    status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    """The error body of the OpenAI API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 401:
        kind = "authentication_error"
    error = {"message": message, "type": kind, "param": param, "code": status}
    return json_response({"error": error}, status, headers)


def json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        content_type="application/json",
        headers=headers,
    )


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """No answer without a JSON body, no exception beyond its request."""
    try:
        return await handler(request)
    except BadRequest as error:
        return error_response(400, str(error), error.param)
    except web.HTTPException as error:
        allow = error.headers.get("Allow")
        message = f"{request.method} {request.path}: {error.reason}"
        return error_response(error.status, message, headers={"Allow": allow} if allow else None)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return error_response(500, "this node made a mistake; its log says more")


def demand_node_key(keys: KeyRing) -> Middleware:
    """Middleware: 401 for all but health and metrics where no key is shown; an empty ring lets
    everybody in. Nothing of the body is read before."""

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        is_open = request.path.startswith("/health") or request.path == "/metrics"
        if is_open or not keys or keys.admits(request.headers.get("Authorization")):
            return await handler(request)
        message = "give this cluster's node key as Authorization: Bearer KEY"
        return error_response(401, message, headers={"WWW-Authenticate": "Bearer"})

    return middleware


class NodeHTTP:
    """The server and its handlers."""

    def __init__(
        self,
        views: Views,
        desk: AdminDesk,
        settings: IOSettings,
        on_garbage: Callable[[str], None],
    ) -> None:
        """`on_garbage` hears of bytes that are not HTTP."""
        self._views = views
        self._desk = desk
        self._settings = settings
        middlewares = [errors_as_json, demand_node_key(settings.http_keys())]
        app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/health/live", self._live)
        app.router.add_get("/health/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/drain", self._drain)
        app.router.add_post("/load_lora_adapter", self._load_adapter)
        app.router.add_post("/unload_lora_adapter", self._unload_adapter)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=SHUTDOWN_S,
            logger=HTTPLog(on_garbage),
        )

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises CannotBind."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise CannotBind(f"HTTP cannot listen at {host}:{port}: {error}") from error
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        await self._runner.cleanup()

    # ------------------------------------------------------------ looking

    async def _health(self, _: web.Request) -> web.Response:
        return _status(self._views.problem())

    async def _live(self, _: web.Request) -> web.Response:
        """Whether this process answers, which it has then shown."""
        return _status(None)

    async def _ready(self, _: web.Request) -> web.Response:
        return _status(self._views.unready())

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._views.metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def _server_info(self, _: web.Request) -> web.Response:
        return json_response(self._views.info())

    # ------------------------------------------------------------ acting

    async def _pause(self, request: web.Request) -> web.Response:
        body = await parse(request, PauseBody)
        return await self._carry_out(Pause(body.mode))

    async def _continue(self, request: web.Request) -> web.Response:
        await parse(request, NoBody)
        return await self._carry_out(Continue())

    async def _flush(self, request: web.Request) -> web.Response:
        await parse(request, NoBody)
        return await self._carry_out(FlushCache())

    async def _abort(self, request: web.Request) -> web.Response:
        body = await parse(request, AbortBody)
        if bool(body.rid) == body.abort_all:
            raise BadRequest("give either a rid or abort_all: true", "rid")
        return await self._carry_out(AbortRequests(body.rid))

    async def _drain(self, request: web.Request) -> web.Response:
        """Answered when it has begun; it ends with the process."""
        await parse(request, NoBody)
        return await self._carry_out(Drain())

    async def _load_adapter(self, request: web.Request) -> web.Response:
        """Answered once it can serve. It goes on when the client hangs up."""
        body = await parse(request, LoadBody)
        _check(name_problem(body.lora_name), "lora_name")
        _check(path_problem(body.lora_path), "lora_path")
        verb = LoadAdapter(name=body.lora_name, path=body.lora_path, pinned=body.pinned)
        return await self._carry_out(verb, self._settings.adapter_timeout_s)

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        """Answered once no request uses it any more."""
        body = await parse(request, UnloadBody)
        _check(name_problem(body.lora_name), "lora_name")
        verb = UnloadAdapter(body.lora_name)
        return await self._carry_out(verb, self._settings.adapter_timeout_s)

    async def _carry_out(self, verb: AdminVerb, timeout_s: float | None = None) -> web.Response:
        patience_s = self._settings.admin_timeout_s if timeout_s is None else timeout_s
        try:
            done = await self._desk.carry_out(verb, patience_s)
        except TimeoutError:
            return error_response(504, f"the engine did not answer in {patience_s:g} s")
        if not done.ok:
            return error_response(400, done.message or "refused")
        answer: dict[str, object] = {"success": True, "message": done.message}
        return json_response(answer | ({"digest": done.digest} if done.digest else {}))


def _check(problem: str | None, param: str) -> None:
    if problem is not None:
        raise BadRequest(problem, param)


def _status(problem: str | None) -> web.Response:
    if problem is None:
        return json_response({"status": "ok"})
    return json_response({"status": "unavailable", "reason": problem}, 503)


Body = TypeVar("Body", bound=msgspec.Struct)


async def parse(request: web.Request, kind: type[Body]) -> Body:
    """The request's JSON, typed; no body is an empty object. Raises BadRequest."""
    raw = await request.read()
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.ValidationError as error:
        _, _, path = str(error).partition(" - at `$.")
        raise BadRequest(str(error), path.rstrip("`") or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
