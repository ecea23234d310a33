"""Ollama's routes at a server of one model. Requests to the model are answered by OpenAI's routes (`octavo.ollama`)."""

import asyncio
import time
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.http.body_reader import replay_body
from octavo.entrypoints.http.router import Router, read_json, whole_body
from octavo.entrypoints.http.server_state import ARRIVAL, ServerState, state_of
from octavo.entrypoints.http.streaming import SERVER_SEND
from octavo.errors import RequestError
from octavo.ollama import API_VERSION, GREETING, plain_name
from octavo.ollama.answers import AnswerTranslator, loaded_answer
from octavo.ollama.cards import of_adapter, refuse_thinking, running, shown, tag
from octavo.ollama.to_openai import Translated, translate_value

router = Router(include_in_schema=False)  # Ollama's own documentation describes them


@router.post("/api/chat")
@router.post("/api/generate")
@router.post("/api/embed")
@router.post("/api/embeddings")
async def answer(raw: Request) -> Response:
    """Answer as /v1/chat/completions, /v1/completions or /v1/embeddings does, in Ollama's form."""
    arrival = ARRIVAL.get()
    begin = time.monotonic() if arrival is None else arrival.at
    data, path = await whole_body(raw), raw.scope["route"].path
    request, body = await read_json(raw, data, lambda given: _translated(path, given))
    if request.only_loads:
        state_of(raw).resolve_model(request.model)
        if request.keep_alive == 0:
            raise RequestError(
                "This server has one model, which stays loaded until the server stops; octavo gateway unloads models.",
                param="keep_alive",
            )
        return JSONResponse(loaded_answer(request, "load"))
    if request.thinks:
        state = state_of(raw)
        state.resolve_model(request.model)
        refuse_thinking(request, await _card(state))
    headers = [*request.headers, *raw.scope["headers"]]
    inner = Request({**raw.scope, "headers": headers}, replay_body(body, raw.receive))
    response: Response = await raw.app.router.plain[request.path].endpoint.answer(inner)
    return _TranslatedResponse(response, request, begin)


@router.get("/api/tags")
async def tags(raw: Request) -> dict[str, Any]:
    """List the names of the model and its adapters."""
    state = state_of(raw)
    card = await _card(state)
    models = [tag(name, card) for name in state.model_names]
    adapters = [] if state.adapters is None else state.adapters.named
    of_adapters = of_adapter(card, state.model_names[0])
    return {"models": models + [tag(name, of_adapters) for name in adapters]}


@router.get("/api/ps")
async def running_models(raw: Request) -> dict[str, Any]:
    """List the model, which stays loaded."""
    state = state_of(raw)
    return {"models": [running(state.model_names[0], await _card(state))]}


@router.post("/api/show")
async def show(raw: Request) -> dict[str, Any]:
    """Describe the model and its capabilities."""
    state = state_of(raw)
    body = await read_json(raw, await whole_body(raw), lambda given: given if isinstance(given, dict) else {})
    name = body.get("model") or body.get("name")
    if not isinstance(name, str):
        raise RequestError("model is required.", param="model")
    state.resolve_model(plain_name(name))
    return shown(await _card(state))


@router.get("/")
async def greet(raw: Request) -> Response:
    """Answer the greeting that Ollama's command line asks for first."""
    if "text/html" in raw.headers.get("accept", ""):
        raise HTTPException(404)
    return PlainTextResponse(GREETING)


@router.get("/api/version")
async def version() -> dict[str, str]:
    """Return the version of Ollama's API that is followed."""
    return {"version": API_VERSION}


def _translated(path: str, given: Any) -> tuple[Translated, bytes]:
    try:
        request = translate_value(path, given)
        return request, msgspec.json.encode(request.body)
    except UnicodeEncodeError:
        raise RequestError("The body has half of a surrogate pair, which is no text.", code="invalid_body") from None


async def _card(state: ServerState) -> dict[str, Any]:
    return await asyncio.to_thread(lambda: state.card)


class _TranslatedResponse(Response):
    """Sends another response in Ollama's form."""

    def __init__(self, inner: Response, request: Translated, begin: float) -> None:
        self._inner, self._request, self._begin = inner, request, begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        translator = AnswerTranslator(send, self._request, self._begin)
        await self._inner({**scope, SERVER_SEND: translator}, receive, translator)
