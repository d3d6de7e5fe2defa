"""Loading and unloading of adapters on the whole cluster, as SGLang's users and vLLM's ask for it.

An answer says `success` and lists `loaded_adapters`, as SGLang's does; one that is no success has
OpenAI's `error` beside them, and its status.
"""

import msgspec
from aiohttp import web

from common.adapter_names import name_problem, path_problem
from router.admin import NodeAnswer
from router.errors import ApiError, invalid
from router.http import json_response, read_body
from router.model_names import ModelNames
from router.protocol.body import decode_body
from router.protocol.requests import LoadAdapterRequest, UnloadAdapterRequest
from router.service import RouterService

_load = msgspec.json.Decoder(LoadAdapterRequest)
_unload = msgspec.json.Decoder(UnloadAdapterRequest)


class LoraApi:
    """Handlers; registered by `routes`."""

    def __init__(self, service: RouterService, names: ModelNames, body_timeout_s: float) -> None:
        self._service = service
        self._names = names
        self._body_timeout_s = body_timeout_s

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/load_lora_adapter", self.load),
            web.post("/v1/load_lora_adapter", self.load),
            web.post("/unload_lora_adapter", self.unload),
            web.post("/v1/unload_lora_adapter", self.unload),
        ]

    async def load(self, request: web.Request) -> web.Response:
        """200 once every node can serve it; else it is on none."""
        body = decode_body(_load, await read_body(request, self._body_timeout_s))
        self._check(body.lora_name, body.lora_path)
        try:
            answers = await self._service.adapter_verbs.load(
                body.lora_name, body.lora_path, pinned=bool(body.pinned)
            )
        except ApiError as error:
            return self._failure(error)
        known = [entry.name for entry in self._service.adapters.entries()]
        self._service.metrics.keep_adapters(known)  # a new one may need a label's place
        digest = next(answer.digest for answer in answers if answer.ok)
        return self._success(answers, digest)

    async def unload(self, request: web.Request) -> web.Response:
        """200 once no node has it; refused for new requests from the first moment."""
        body = decode_body(_unload, await read_body(request, self._body_timeout_s))
        try:
            answers = await self._service.adapter_verbs.unload(body.lora_name)
        except ApiError as error:
            return self._failure(error)
        return self._success(answers)

    def _success(self, answers: list[NodeAnswer], digest: str | None = None) -> web.Response:
        body = {
            "success": True,
            "loaded_adapters": self._service.adapters.paths(),
            "nodes": [answer.info() for answer in answers],
        }
        return json_response(body | ({"digest": digest} if digest is not None else {}))

    def _failure(self, error: ApiError) -> web.Response:
        body = {
            "success": False,
            "error_message": error.message,
            "loaded_adapters": self._service.adapters.paths(),
        }
        return json_response(body | error.body(), error.status)

    def _check(self, name: str, path: str) -> None:
        """Refuse what cannot be an adapter's name or path. Raises ApiError."""
        problem = name_problem(name)
        if self._names.is_base(name):
            problem = f"{name!r} is the model's own name"
        if problem is not None:
            raise invalid(f"lora_name: {problem}", "lora_name")
        problem = path_problem(path)
        if problem is not None:
            raise invalid(f"lora_path: {problem}", "lora_path")
