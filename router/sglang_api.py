"""SGLang's /generate and /health_generate."""

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from router.arrivals import Arrival
from router.errors import invalid, unavailable
from router.generation import Generation
from router.http import HttpLimits, json_response, make_body, read_body, request_id, session_of
from router.metrics import RouterMetrics
from router.prepare import Preparer
from router.prepared import Prepared
from router.protocol.body import decode_body
from router.protocol.requests import GenerateRequest, SglangSampling
from router.protocol.sglang import GenerateBodies, GenerateChunks
from router.protocol.sglang_wishes import logprob_wishes
from router.protocol.terms import MAX_PRIORITY, Terms
from router.service import RouterService
from router.sse import SseStream
from router.streaming import stream

PROBE = Terms(priority=-MAX_PRIORITY, whole_path=True)
"""A health check asks whether the path works, not how long the queue is."""
_generate = msgspec.json.Decoder(GenerateRequest)


class SglangApi:
    """Handlers; registered by `routes`."""

    def __init__(
        self,
        service: RouterService,
        preparer: Preparer,
        metrics: RouterMetrics,
        limits: HttpLimits,
        health_timeout_s: float,
    ) -> None:
        self._service = service
        self._preparer = preparer
        self._codec = preparer.codec
        self._metrics = metrics
        self._limits = limits
        self._health_timeout_s = health_timeout_s

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self.generate),
            web.put("/generate", self.generate),
            web.get("/health_generate", self.health_generate),
        ]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        with self._service.arrivals.open() as arrival:
            self._service.check_arrival(arrival)
            body = decode_body(_generate, await read_body(request, self._limits.body_timeout_s))
            arrival.rid = request_id(request, body.rid if isinstance(body.rid, str) else None)
            session = session_of(request, self._limits.session_header)
            terms = body.terms(session=session, higher_first=True)  # as SGLang has it
            self._service.check_arrival(arrival, terms)
            prepared = await self._preparer.generate(body)
            return await self._answer(request, body, arrival, terms, prepared)

    async def _answer(
        self,
        request: web.Request,
        body: GenerateRequest,
        arrival: Arrival,
        terms: Terms,
        prepared: Prepared,
    ) -> web.StreamResponse:
        rids = _rids(arrival.rid, body.rid, prepared)
        lengths = [len(choice.prompt_ids) for choice in prepared.choices[:: prepared.n]]
        bodies = GenerateBodies(
            self._codec,
            prepared,
            logprob_wishes(body, lengths),
            logprob_texts=bool(body.return_text_in_logprobs),
        )
        single = _is_single(body, prepared)
        headers = {"X-Request-Id": arrival.rid}
        with Generation(self._service, self._codec, arrival, prepared, terms) as generation:
            if body.stream:
                with self._metrics.open_streams.track_inprogress():
                    sse = SseStream(request, self._limits, headers)
                    chunks = GenerateChunks(bodies, generation, rids, single=single)
                    return await stream(sse, generation, chunks)
            results = await generation.collect()

            def build() -> Any:
                answers = [
                    bodies.body(generation, rids[i], i, result, ended=True)
                    for i, result in enumerate(results)
                ]
                return answers[0] if single else answers

            return json_response(await make_body(build, prepared.num_scores), headers=headers)

    async def health_generate(self, request: web.Request) -> web.Response:
        """One token over the very path that requests take."""
        wish = SglangSampling(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        body = GenerateRequest(input_ids=[0], sampling_params=wish)
        prepared = await self._preparer.generate(body)
        with (
            self._service.arrivals.open(exempt=True) as arrival,
            Generation(self._service, self._codec, arrival, prepared, PROBE) as generation,
        ):
            arrival.rid = f"health-{request_id(request)}"
            try:
                async with asyncio.timeout(self._health_timeout_s):
                    await generation.collect()
            except TimeoutError:
                message = f"no token came within {self._health_timeout_s:g} s"
                raise unavailable(message, "unhealthy") from None
        return json_response({"status": "ok"})


def _is_single(body: GenerateRequest, prepared: Prepared) -> bool:
    """Whether one prompt was given as such, and one answer is wanted."""
    given = body.text if body.text is not None else body.input_ids
    batch = isinstance(given, list) and not (given and isinstance(given[0], int))
    return not batch and prepared.n == 1


def _rids(rid: str, given: str | list[str] | None, prepared: Prepared) -> list[str]:
    """The id of each choice in the answer."""
    count = len(prepared.choices)
    if isinstance(given, list):
        if len(given) != prepared.num_prompts:
            message = f"rid: {len(given)} given for {prepared.num_prompts} prompts"
            raise invalid(message, "rid")
        return [given[i // prepared.n] for i in range(count)]
    return [rid] if count == 1 else [f"{rid}-{i}" for i in range(count)]
