"""OpenAI's endpoints: completions, chat completions, models; and vLLM's tokenize, detokenize."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from router.adapters import AdapterState, Entry
from router.arrivals import Arrival
from router.best_of import best_of
from router.errors import invalid
from router.generation import ChoiceResult, Generation
from router.http import HttpLimits, json_response, make_body, read_body, request_id, session_of
from router.metrics import RouterMetrics
from router.prepare import Preparer
from router.prepared import Prepared
from router.protocol.body import decode_body
from router.protocol.chunks import OpenAIChunks
from router.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    OpenAIRequest,
    StreamOptions,
    TokenizeRequest,
)
from router.protocol.responses import Bodies, ChatBodies, CompletionBodies, Head, usage
from router.protocol.terms import Terms
from router.service import RouterService
from router.sse import SseStream
from router.streaming import stream

R = TypeVar("R", bound=OpenAIRequest)

_completion = msgspec.json.Decoder(CompletionRequest)
_chat = msgspec.json.Decoder(ChatRequest)
_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


class OpenAIApi:
    """Handlers; registered by `routes`."""

    def __init__(
        self,
        service: RouterService,
        preparer: Preparer,
        metrics: RouterMetrics,
        limits: HttpLimits,
    ) -> None:
        self._service = service
        self._preparer = preparer
        self._limits = limits
        self._codec = preparer.codec
        self._metrics = metrics
        self._started = int(time.time())
        self._eos = frozenset(preparer.info.eos_token_ids)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{name:.+}", self.model),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
        ]

    # ------------------------------------------------------------ generation

    async def completions(self, request: web.Request) -> web.StreamResponse:
        with self._service.arrivals.open() as arrival:
            body, terms = await self._take_in(request, arrival, _completion)
            prepared = await self._preparer.completion(body)

            def bodies() -> Bodies:
                head = self._head(f"cmpl-{arrival.rid}", body.model)
                return CompletionBodies(head, self._codec, body, prepared)

            return await self._answer(request, body, arrival, terms, prepared, bodies)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        with self._service.arrivals.open() as arrival:
            body, terms = await self._take_in(request, arrival, _chat)
            prepared = await self._preparer.chat(body)

            def bodies() -> Bodies:
                head = self._head(f"chatcmpl-{arrival.rid}", body.model)
                return ChatBodies(head, self._codec, body, prepared)

            return await self._answer(request, body, arrival, terms, prepared, bodies)

    async def _take_in(
        self, request: web.Request, arrival: Arrival, decoder: msgspec.json.Decoder[R]
    ) -> tuple[R, Terms]:
        """Read the body, refusing before it by number and after it by wait. Raises ApiError."""
        self._service.check_arrival(arrival)
        body = decode_body(decoder, await read_body(request, self._limits.body_timeout_s))
        arrival.rid = request_id(request)
        terms = body.terms(session=session_of(request, self._limits.session_header))
        self._service.check_arrival(arrival, terms)
        return body, terms

    def _head(self, answer_id: str, model: str | None) -> Head:
        name = model or self._preparer.names.served
        return Head(answer_id, int(time.time()), name, self._eos)

    async def _answer(
        self,
        request: web.Request,
        body: OpenAIRequest,
        arrival: Arrival,
        terms: Terms,
        prepared: Prepared,
        make_bodies: Callable[[], Bodies],
    ) -> web.StreamResponse:
        streamed = bool(body.stream)
        if body.stream_options is not None and not streamed:
            raise invalid("stream_options needs stream", "stream_options")
        headers = {"X-Request-Id": arrival.rid}
        bodies = make_bodies()
        with Generation(self._service, self._codec, arrival, prepared, terms) as generation:
            if streamed:
                with self._metrics.open_streams.track_inprogress():
                    sse = SseStream(request, self._limits, headers)
                    options = body.stream_options or StreamOptions()
                    return await stream(sse, generation, OpenAIChunks(bodies, generation, options))
            results = await generation.collect()
            if prepared.num_kept is not None:
                results = best_of(results, prepared.n, prepared.num_kept)
            build = partial(_whole, bodies, results, usage(generation))
            return json_response(await make_body(build, prepared.num_scores), headers=headers)

    # ------------------------------------------------------------ models

    async def models(self, _request: web.Request) -> web.Response:
        usable = [e for e in self._service.adapters.entries() if e.state is AdapterState.READY]
        cards = [self._card(None), *(self._card(entry) for entry in usable)]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.Response:
        entry = self._preparer.names.entry(request.match_info["name"])
        return json_response(self._card(entry))

    def _card(self, adapter: Entry | None) -> dict[str, object]:
        """Of the model itself, or of an adapter of it."""
        base = self._preparer.names.served
        return {
            "id": base if adapter is None else adapter.name,
            "object": "model",
            "created": self._started,
            "owned_by": "pdserve",
            "root": self._preparer.info.root if adapter is None else adapter.path,
            "parent": None if adapter is None else base,
            "max_model_len": self._preparer.max_model_len,
        }

    # ------------------------------------------------------------ tokens

    async def tokenize(self, request: web.Request) -> web.Response:
        body = decode_body(_tokenize, await read_body(request))
        self._preparer.names.entry(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            ids = await self._codec.encode(body.prompt, add_special_tokens=special)
        else:
            ids = await self._preparer.chats.ids(
                body.messages or [],
                add_generation_prompt=body.add_generation_prompt is not False,
                tools=self._preparer.chats.tools(body.tools),
            )
        answer = {
            "count": len(ids),
            "max_model_len": self._preparer.max_model_len,
            "tokens": ids,
            "token_strs": [self._codec.decode([id_]) for id_ in ids]
            if body.return_token_strs
            else None,
        }
        return json_response(answer)

    async def detokenize(self, request: web.Request) -> web.Response:
        body = decode_body(_detokenize, await read_body(request))
        self._preparer.names.entry(body.model)
        limit = self._preparer.info.vocab_size
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < limit:
            raise invalid(f"tokens must be in [0, {limit})", "tokens")
        return json_response({"prompt": self._codec.decode(body.tokens)})


def _whole(bodies: Bodies, results: Sequence[ChoiceResult], used: dict[str, Any]) -> dict[str, Any]:
    """An answer that is not streamed."""
    choices = [bodies.choice(i, result) for i, result in enumerate(results)]
    return {**bodies.head.body(bodies.kind, choices), **bodies.extras(results), "usage": used}
