"""Health, metrics, server info, and the administrative verbs for the cluster or one node."""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.messages import AbortRequests, AdminVerb, Continue, Drain, FlushCache, Pause
from common.modes import PauseMode
from router.adapters import AdapterState
from router.errors import invalid, not_found
from router.http import json_response, read_body
from router.metrics import CONTENT_TYPE, RouterMetrics, counter_family, gauge_family
from router.node import Node
from router.prepare import Preparer
from router.protocol.body import decode_body
from router.protocol.requests import AbortRequest, NodeRequest, PauseRequest
from router.requests import JobState
from router.service import RouterService

_pause = msgspec.json.Decoder(PauseRequest)
_node = msgspec.json.Decoder(NodeRequest)
_abort = msgspec.json.Decoder(AbortRequest)


class ServerApi:
    """Handlers; registered by `routes`."""

    def __init__(self, service: RouterService, preparer: Preparer, metrics: RouterMetrics) -> None:
        self._service = service
        self._preparer = preparer
        self._metrics = metrics
        metrics.attach(_ServiceCollector(service))

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/health/live", self.live),
            web.get("/health/ready", self.ready),
            web.get("/live", self.live),
            web.get("/metrics", self.metrics),
            web.get("/get_server_info", self.server_info),
            web.get("/server_info", self.server_info),
            web.get("/get_model_info", self.model_info),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.post("/abort_request", self.abort),
            web.post("/flush_cache", self.flush_cache),
            web.get("/flush_cache", self.flush_cache),
            web.post("/drain", self.drain),
        ]

    # ------------------------------------------------------------ reading

    async def health(self, _request: web.Request) -> web.Response:
        """200 where a request can be served, now or after a pause."""
        missing = self._service.registry.fleet.missing()
        if missing is not None:
            return json_response({"status": "unavailable", "message": missing}, 503)
        return json_response({"status": "ok"})

    async def live(self, _request: web.Request) -> web.Response:
        """200 as long as this process answers."""
        return json_response({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.Response:
        """200 where a request can be served: a pair of nodes is there and has shaken hands."""
        reason = self._service.unready()
        if reason is not None:
            return json_response({"status": "unavailable", "reason": reason}, 503)
        return json_response({"status": "ok"})

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def server_info(self, _request: web.Request) -> web.Response:
        dispatcher = self._service.dispatcher
        registry = self._service.registry
        paused = dispatcher.paused
        return json_response(
            {
                "model": self._preparer.names.served,
                "incarnation": registry.me,
                "pid": os.getpid(),
                "paused": paused.value if paused is not None else None,
                "unready": self._service.unready(),
                "max_model_len": self._preparer.max_model_len,
                "requests": {state.value: dispatcher.jobs.count(state) for state in _UNFINISHED},
                "mismatches": registry.fleet.mismatches,
                "adapters": self._adapters(),
                "nodes": [_node_info(node) for node in registry.all()],
            }
        )

    def _adapters(self) -> list[dict[str, Any]]:
        """All adapters of the cluster, and which nodes can serve just that content."""
        return [
            {
                "name": entry.name,
                "path": entry.path,
                "digest": entry.digest,
                "pinned": entry.pinned,
                "state": entry.state.value,
                "running": self._service.dispatcher.jobs.of_adapter(entry.name),
                "nodes": [
                    node.hello.name
                    for node in self._service.registry.all()
                    if node.holds(entry.adapter)
                ],
            }
            for entry in self._service.adapters.entries()
        ]

    async def model_info(self, _request: web.Request) -> web.Response:
        info = self._preparer.info
        return json_response(
            {
                "model_path": info.root,
                "tokenizer_path": info.root,
                "served_model_name": self._preparer.names.served,
                "is_generation": True,
                "vocab_size": info.vocab_size,
                "max_model_len": self._preparer.max_model_len,
                "eos_token_ids": list(info.eos_token_ids),
                "adapters": self._adapters(),
            }
        )

    # ------------------------------------------------------------ verbs

    async def pause(self, request: web.Request) -> web.Response:
        body = decode_body(_pause, await read_body(request) or b"{}")
        mode = body.mode or PauseMode.ABORT.value
        if mode not in {known.value for known in PauseMode}:
            names = ", ".join(known.value for known in PauseMode)
            raise invalid(f"mode must be one of {names}", "mode")
        verb = Pause(PauseMode(mode))
        if body.node is None:
            self._service.pause_dispatch(verb)
        return await self._administer(body.node, verb, "generation is paused")

    async def resume(self, request: web.Request) -> web.Response:
        body = decode_body(_node, await read_body(request) or b"{}")
        try:
            return await self._administer(body.node, Continue(), "generation goes on")
        finally:
            if body.node is None:
                self._service.resume_dispatch()
            else:
                self._service.dispatch()

    async def flush_cache(self, request: web.Request) -> web.Response:
        body = decode_body(_node, await read_body(request) or b"{}")
        return await self._administer(body.node, FlushCache(), "the prefix caches are empty")

    async def abort(self, request: web.Request) -> web.Response:
        body = decode_body(_abort, await read_body(request) or b"{}")
        if not body.rid and not body.abort_all:
            raise invalid("give rid or abort_all", "rid")
        rid = None if body.abort_all else body.rid
        count = 0 if body.node is not None else self._service.abort(rid)
        verb = AbortRequests(rid or "")
        return await self._administer(body.node, verb, f"{count} of this router's choices aborted")

    async def drain(self, request: web.Request) -> web.Response:
        """A named node, or this router itself: take nothing new, finish what is there, and end."""
        body = decode_body(_node, await read_body(request) or b"{}")
        if body.node is not None:
            return await self._administer(body.node, Drain(), f"{body.node} is draining")
        self._service.drain()
        return json_response({"status": "ok", "message": "the router is draining", "nodes": []})

    async def _administer(self, name: str | None, verb: AdminVerb, message: str) -> web.Response:
        """Have one node or all carry out a verb; 200 only if each did."""
        registry = self._service.registry
        nodes = registry.all() if name is None else registry.named(name)
        if name is not None and not nodes:
            raise not_found(f"there is no node {name[:200]!r}", "node", "unknown_node")
        answers = await self._service.administer(nodes, verb)
        refused = [answer for answer in answers if not answer.ok]
        if refused:
            message = "; ".join(f"{answer.name}: {answer.message}" for answer in refused)
        body = {
            "status": "error" if refused else "ok",
            "message": message,
            "nodes": [answer.info() for answer in answers],
        }
        return json_response(body, 400 if refused else 200)


_UNFINISHED = (JobState.QUEUED, JobState.DISPATCHED, JobState.BACKING_OFF)


def _node_info(node: Node) -> dict[str, Any]:
    stats, hello = node.stats, node.hello
    seen = stats.num_pages > 0  # the first heartbeat has come
    return {
        "name": hello.name,
        "role": hello.role.value,
        "url": hello.url,
        "pid": hello.pid,
        "state": node.state.value if node.linked else "unreachable",
        "running": stats.running,
        "queues": dict(stats.queues),
        "free_pages": stats.free_pages if seen else hello.num_pages,
        "cached_pages": stats.cached_pages,
        "quarantined_pages": stats.quarantined_pages,
        "num_pages": hello.num_pages,
        "queued_tokens": stats.queued_tokens,
        "step_age_s": node.step_age_s,
        "incarnation": node.incarnation,
        "max_model_len": hello.max_model_len,
        "max_running_requests": hello.max_running_requests,
        "weight_version": hello.weight_version,
        "counters": dict(stats.counters),
        "linked_peers": list(stats.linked_peers),
        "adapters": {name: info.digest for name, info in (node.adapters or {}).items()},
        "equipped": node.is_equipped,
        "lora_slots": stats.lora_slots,
        "lora_slots_used": stats.lora_slots_used,
        "running_loras": dict(stats.running_loras),
    }


class _ServiceCollector(Collector):
    """Numbers that the pure parts keep, read when someone asks."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        dispatcher, registry = self._service.dispatcher, self._service.registry
        states = [([state.value], float(dispatcher.jobs.count(state))) for state in _UNFINISHED]
        yield gauge_family("unfinished", "Unfinished choices.", ["state"], states)
        paused = float(dispatcher.paused is not None)
        yield gauge_family("paused", "Whether the cluster is paused.", [], [([], paused)])
        nodes = [
            ([node.role.value, node.hello.name, node.state.value], float(node.linked))
            for node in registry.all()
        ]
        yield gauge_family("nodes", "Linked nodes.", ["role", "name", "state"], nodes)
        yield from self._overload()
        yield from self._adapters()
        yield from self._index()
        replays = {cause.value: count for cause, count in dispatcher.replays.items()}
        yield counter_family("replays", "Attempts followed by another.", "cause", replays)
        text = "Attempts begun on a pair of nodes, or on a decode node alone."
        yield counter_family("attempts", text, "path", dispatcher.paths)
        events = {**dispatcher.counters, **self._service.counters}
        yield counter_family("events", "Dropped frames, stale rooms and the like.", "kind", events)

    def _adapters(self) -> Iterator[Metric]:
        entries, verbs = self._service.adapters.entries(), self._service.adapter_verbs
        states = Counter(entry.state for entry in entries)
        values = [([state.value], float(states[state])) for state in AdapterState]
        yield gauge_family("loras", "Adapters of the cluster.", ["state"], values)
        yield counter_family("lora_loads", "Loads of adapters.", "outcome", verbs.loads)
        yield counter_family("lora_unloads", "Unloads of adapters.", "outcome", verbs.unloads)
        count = self._service.adapters.mismatches
        text = "Nodes that came with other content under an adapter's name."
        yield counter_family("lora_mismatches", text, "kind", {"digest": count})

    def _index(self) -> Iterator[Metric]:
        index = self._service.dispatcher.cache
        yield _gauge("index_pages", "Cached pages, of all nodes, that are known.", len(index))
        known = [
            ([node.role.value, node.hello.name], float(index.pages_of(node.incarnation)))
            for node in self._service.registry.all()
        ]
        text = "Cached pages of each node that are known."
        yield gauge_family("index_node_pages", text, ["role", "name"], known)
        text = "What nodes said of their caches, and what became of it."
        yield counter_family("index_events", text, "kind", index.counters)
        text = "Tokens of attempts, and those of them that the chosen nodes had cached."
        routed = self._service.dispatcher.intake.load.routed
        yield counter_family("routed_tokens", text, "kind", routed)

    def _overload(self) -> Iterator[Metric]:
        dispatcher = self._service.dispatcher
        admission, backlog = dispatcher.intake.admission, dispatcher.backlog()
        refused = {reason.value: count for reason, count in admission.refused.items()}
        yield counter_family("refused", "Requests refused at admission.", "reason", refused)
        yield _gauge("queued_tokens", "Prompt tokens not computed yet.", backlog.queued_tokens)
        yield _gauge("kv_wanted_tokens", "KV of all unfinished choices.", backlog.held_tokens)
        arriving = len(self._service.arrivals)
        yield _gauge("arriving", "Requests being read and tokenised.", arriving)
        text = "Prompt tokens computed per second when there is enough to do; 0 if unknown."
        yield _gauge("prefill_tokens_per_second", text, admission.prefill_tokens_per_s or 0.0)
        wait_s = admission.wait_s(backlog.tokens_ahead) or 0.0
        yield _gauge("estimated_wait_seconds", "For a new request; 0 if unknown.", wait_s)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return gauge_family(name, help_text, [], [([], float(value))])
