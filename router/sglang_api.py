"""SGLang's /generate and /health_generate."""

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from router.errors import ApiError, invalid, unavailable
from router.generation import ChoiceResult, Generation
from router.http import json_response, read_body, request_id
from router.metrics import RouterMetrics
from router.prepare import Prepared, Preparer
from router.protocol.body import decode_body
from router.protocol.requests import GenerateRequest, SglangSampling
from router.protocol.sglang import GenerateBodies
from router.service import RouterService
from router.sse import SseStream

_generate = msgspec.json.Decoder(GenerateRequest)


class SglangApi:
    """Handlers; registered by `routes`."""

    def __init__(
        self,
        service: RouterService,
        preparer: Preparer,
        metrics: RouterMetrics,
        health_timeout_s: float,
    ) -> None:
        self._service = service
        self._preparer = preparer
        self._codec = preparer.codec
        self._metrics = metrics
        self._health_timeout_s = health_timeout_s

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self.generate),
            web.put("/generate", self.generate),
            web.get("/health_generate", self.health_generate),
        ]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = decode_body(_generate, await read_body(request))
        prepared = await self._preparer.generate(body)
        rid = request_id(request, body.rid if isinstance(body.rid, str) else None)
        rids = _rids(rid, body.rid, prepared)
        bodies = GenerateBodies(
            self._codec,
            logprobs=bool(body.return_logprob),
            top=bool(body.top_logprobs_num),
            logprob_texts=bool(body.return_text_in_logprobs),
        )
        stream = bool(body.stream)
        single = _is_single(body, prepared)
        headers = {"X-Request-Id": rid}
        with Generation(self._service, self._codec, rid, prepared, stream=stream) as generation:
            if stream:
                with self._metrics.open_streams.track_inprogress():
                    sse = SseStream(request, headers)
                    return await _stream(sse, generation, bodies, rids, single=single)
            results = await generation.collect()
            answers = [
                bodies.body(generation, rids[i], i, result, ended=True)
                for i, result in enumerate(results)
            ]
            return json_response(answers[0] if single else answers, headers=headers)

    async def health_generate(self, request: web.Request) -> web.Response:
        """One token over the very path that requests take."""
        wish = SglangSampling(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        body = GenerateRequest(input_ids=[0], sampling_params=wish)
        prepared = await self._preparer.generate(body)
        rid = f"health-{request_id(request)}"
        with Generation(self._service, self._codec, rid, prepared, stream=False) as generation:
            try:
                async with asyncio.timeout(self._health_timeout_s):
                    await generation.collect()
            except TimeoutError:
                message = f"no token came within {self._health_timeout_s:g} s"
                raise unavailable(message, "unhealthy") from None
        return json_response({"status": "ok"})


async def _stream(
    sse: SseStream, generation: Generation, bodies: GenerateBodies, rids: list[str], *, single: bool
) -> web.StreamResponse:
    """Send each choice's text so far, whenever it has grown."""
    results = [ChoiceResult() for _ in rids]
    try:
        async for batch in generation.deltas():
            chunks: dict[int, dict[str, Any]] = {}
            for delta in batch:
                result = results[delta.choice]
                result.add(delta)
                if not delta.text and delta.finish is None:
                    continue
                choice, ended = delta.choice, delta.finish is not None
                chunk = bodies.body(generation, rids[choice], choice, result, ended=ended)
                chunks[choice] = chunk if single else {**chunk, "index": choice}
            await sse.send(list(chunks.values()))
    except ApiError as error:
        if not sse.begun:
            raise
        return await sse.fail(error)
    return await sse.end()


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
