"""Composition of the router: reads the model's folder, opens both sockets, runs until cancelled."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random, SystemRandom
from uuid import uuid4

from aiohttp import web

from common.credentials import ClusterKeys
from common.http_log import HTTPLog
from router.access import Access, demand_keys
from router.adapter_verbs import AdapterLimits
from router.adapters import AdapterCatalogue
from router.admission import AdmissionLimits
from router.cache_index import CacheIndex
from router.config import RouterConfig, parse_adapters
from router.dispatcher import Dispatcher
from router.errors import unavailable
from router.grammar_checks import GrammarChecks
from router.http import HttpLimits, shield_errors
from router.limits import Limits
from router.local_prefill import LocalLimits
from router.lora_api import LoraApi
from router.metrics import RouterMetrics
from router.model_names import ModelNames
from router.nodes import NodeRegistry
from router.openai_api import OpenAIApi
from router.policies import COMPUTE_WEIGHT, make_choice
from router.prepare import Preparer
from router.replay import ReplayLimits
from router.server_api import ServerApi
from router.service import RouterService
from router.sglang_api import SglangApi
from router.tokens import load_codec, load_model_info

log = logging.getLogger("router")

ANYBODY = Access()
SHUTDOWN_S = 2.0
"""How long open answers may take to leave at the end."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a started router is reached."""

    http_url: str
    node_address: str


async def serve(
    config: RouterConfig,
    model_path: Path,
    *,
    access: Access = ANYBODY,
    ready: Callable[[Listening], None] | None = None,
    end: asyncio.Event | None = None,
) -> None:
    """Run a router until `end` is set, by who holds it or by `POST /drain`, and it has drained.

    `access` says who may enter: by default everybody who reaches the sockets. `ready` is called
    once both listen. What is unfinished when the drain's time is over, or when this task is
    cancelled, is answered 503 and aborted on its nodes.

    Raises:
        UnusableModelFolder: there is no usable tokenizer in `model_path`.
        OSError: an address cannot be bound.
        NoCurve: there is a cluster secret, and a libzmq that can do nothing with it.
    """
    # Rooms and seeds must not repeat between routers or restarts; asking the system for each would
    # be a system call a time.
    random = Random(SystemRandom().getrandbits(256))
    codec = load_codec(model_path)
    info = load_model_info(model_path, codec)
    service = _service(config, random, end or asyncio.Event(), access.keys)
    names = ModelNames(config.model_name, config.model, service.adapters)
    grammars = GrammarChecks(model_path, info.vocab_size, config.grammar_timeout_s)
    text = "Grammars that clients sent."
    service.metrics.show("grammar_checks", text, "outcome", grammars.counts)
    preparer = Preparer(codec, info, service.registry, config, names, random, grammars)
    runner = _runner(_application(config, access, service, preparer), service)
    try:
        node_port = service.start(config.node_host, config.node_port)
        await runner.setup()
        site = web.TCPSite(runner, config.host, config.port)
        await site.start()
        port = runner.addresses[0][1]
        listening = Listening(
            f"http://{_in_url(config.host)}:{port}",
            f"tcp://{_in_url(config.node_host)}:{node_port}",
        )
        log.info("HTTP on %s, nodes on %s", listening.http_url, listening.node_address)
        if ready is not None:
            ready(listening)
        await service.asked_to_end.wait()
        service.drain()
        await service.wait_until_empty(config.drain_s)
    finally:
        service.fail_all(unavailable("the router is shutting down", "shutting_down"))
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # the handlers write their last words
        await runner.cleanup()
        await service.adapter_verbs.close(SHUTDOWN_S)
        await service.stop()
        await grammars.close()


def _service(
    config: RouterConfig, random: Random, end: asyncio.Event, keys: ClusterKeys | None
) -> RouterService:
    registry = NodeRegistry(
        f"router-{uuid4().hex}", config.node_timeout_s, decode_alone=config.decode_alone
    )
    adapters = AdapterCatalogue()
    for name, path in parse_adapters(config.lora).items():
        adapters.want(name, path)
    dispatcher = Dispatcher(
        registry,
        _limits(config),
        choose_prefill=make_choice(config.prefill_policy, random, COMPUTE_WEIGHT),
        choose_decode=make_choice(config.decode_policy, random),
        random=random,
        adapters=adapters,
        cache=CacheIndex(config.max_index_pages),
    )
    return RouterService(
        registry,
        dispatcher,
        RouterMetrics(),
        adapters=adapters,
        adapter_limits=AdapterLimits(
            load_timeout_s=config.lora_load_timeout_s,
            unload_timeout_s=config.lora_unload_timeout_s,
            roll_back_s=config.admin_timeout_s,
        ),
        heartbeat_s=config.heartbeat_s,
        admin_timeout_s=config.admin_timeout_s,
        asked_to_end=end,
        keys=keys,
    )


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _runner(app: web.Application, service: RouterService) -> web.AppRunner:
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=SHUTDOWN_S,
        logger=HTTPLog(service.on_garbage_http),
    )


def _application(
    config: RouterConfig, access: Access, service: RouterService, preparer: Preparer
) -> web.Application:
    metrics = service.metrics
    app = web.Application(
        client_max_size=config.max_body_bytes,
        middlewares=[shield_errors(metrics), demand_keys(access)],
    )
    limits = HttpLimits(
        body_timeout_s=config.body_timeout_s,
        max_unsent_bytes=config.max_unsent_bytes,
        send_timeout_s=config.send_timeout_s,
        session_header=config.session_header,
    )
    sglang = SglangApi(service, preparer, metrics, limits, config.health_timeout_s)
    app.add_routes(OpenAIApi(service, preparer, metrics, limits).routes())
    app.add_routes(sglang.routes())
    app.add_routes(LoraApi(service, preparer.names, config.body_timeout_s).routes())
    app.add_routes(ServerApi(service, preparer, metrics).routes())
    return app


def _limits(config: RouterConfig) -> Limits:
    return Limits(
        node_wait_s=config.node_wait_s,
        request_timeout_s=config.request_timeout_s,
        waits_for_cached=config.prefill_policy == "cache_aware",
        local=LocalLimits(tokens=config.local_prefill_tokens, share=config.local_prefill_share),
        admission=AdmissionLimits(
            max_requests=config.max_requests,
            max_queue_s=config.max_queue_s,
            max_queued_tokens=config.max_queued_tokens,
            max_kv_oversubscription=config.max_kv_oversubscription,
        ),
        replay=ReplayLimits(
            max_after_death=config.max_replays_after_death,
            max_after_fault=config.max_replays_after_fault,
            max_after_refusal=config.max_replays_after_refusal,
            backoff_s=config.backoff_s,
        ),
    )
