"""Ollama's routes at the gateway. Requests to a model are translated to OpenAI's (`octavo.ollama`) and take the usual
way; the others list, show, fetch and remove models."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec

from octavo.errors import OctavoError, RequestError
from octavo.gateway.client import Client
from octavo.gateway.client_keys import WITHOUT_LIMITS, Key
from octavo.gateway.deployment import Deployment
from octavo.gateway.models import Models
from octavo.gateway.octavo_commands import ModelCards, run_octavo
from octavo.gateway.proxy import Proxy
from octavo.gateway.proxy_request import ProxyRequest, check_use
from octavo.gateway.request_body import LARGE_BYTES, RequestBody, parse
from octavo.gateway.upstream import UpstreamError
from octavo.gateway.usage_counter import UsageCounter
from octavo.ollama import API_VERSION, UNBUILT, plain_name, refuse_unbuilt
from octavo.ollama.answers import AnswerTranslator, loaded_answer
from octavo.ollama.cards import NEVER, refuse_thinking, running, shown, tag
from octavo.ollama.to_openai import PATHS, Translated, translate

_MAX_CARD_BYTES = 16 << 20
_LENGTH_S = 2.0  # for a replica's answer about its context length
_ROUTES = {
    "/api/tags": "GET", "/api/ps": "GET", "/api/version": "GET", "/api/show": "POST", "/api/pull": "POST",
    "/api/delete": "DELETE",
}  # fmt: skip


class _Named(msgspec.Struct):
    """The body of a request about a model; `name` is an older name of `model`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class OllamaRoutes:
    """Call `begin` for each request below Ollama's prefix."""

    def __init__(self, models: Models, proxy: Proxy) -> None:
        self._models, self._proxy = models, proxy
        self._cards = ModelCards()

    async def begin(self, request: ProxyRequest, client: Client) -> tuple[Client, Callable[[], Awaitable[None]]]:
        """Return the client to answer in the place of `client`, and the work that answers it. Of the body of `request`
        only the bytes are read. Raises `RequestError`."""
        path, method = request.path, request.method
        if any(path.startswith(unbuilt) for unbuilt in UNBUILT):
            refuse_unbuilt(path)
        wanted = "POST" if path in PATHS else _ROUTES.get(path)
        if wanted is None:
            raise RequestError(f"Invalid URL ({method} {path:.200})", status=404)
        if method != wanted:
            raise RequestError(f"Not allowed to {method} on {path}; it takes {wanted}.", status=405, allow=wanted)
        if path in PATHS:
            return await self._begin_generation(request, client)
        if path == "/api/version":
            return client, lambda: _reply(client, {"version": API_VERSION})
        key = None if request.usage_counter is None else request.usage_counter.key
        if path == "/api/tags":
            return client, lambda: self._tags(client, key)
        if path == "/api/ps":
            return client, lambda: self._running(client, key)
        body = parse(request.body.data, msgspec.json.Decoder(_Named).decode, path)
        name = plain_name(body.model or body.name or "")
        if not name:
            raise RequestError("model is required.", param="model")
        if path == "/api/show":
            return client, lambda: self._show(name, client, key)
        if key is not None:
            raise RequestError(f"{path} is not for keys of --keys; {WITHOUT_LIMITS}.", status=403, code="not_allowed")
        if not self._models.is_open:
            raise RequestError(
                f"{path} is for a gateway without a catalogue; this one serves the models that it was given.",
                status=403, code="not_allowed",
            )  # fmt: skip
        if request.header(b"origin") is not None:  # a page in a browser, which could send this without asking
            raise RequestError(f"{path} is not for pages in a browser.", status=403, code="not_allowed")
        if path == "/api/pull":
            return client, lambda: self._pull(name, client, streams=body.stream is not False)
        return client, lambda: self._delete(name, client)

    async def _begin_generation(
        self, request: ProxyRequest, client: Client
    ) -> tuple[Client, Callable[[], Awaitable[None]]]:
        if len(request.body.data) > LARGE_BYTES:  # a thread: the event loop runs between two calls of msgspec at least
            translated, data = await asyncio.to_thread(_translated, request.path, request.body.data)
        else:
            translated, data = _translated(request.path, request.body.data)
        if translated.only_loads:
            return client, lambda: self._load(translated, client, request.usage_counter)
        translator = AnswerTranslator(client.send, translated, request.arrival)
        # Ollama's answers cannot have comments, so the inner request does not ask for events.
        inner_client = Client(translator, translated.path, request_id=client.request_id)
        translator.load_s = partial(sum, inner_client.loads_s)  # not the client, which has the translator
        is_stream = "stream" in translated.body
        body = RequestBody(data, translated.model, is_stream, is_json=True, wants_usage=is_stream)
        headers = [one for one in request.headers if one[0] not in (b"content-type", b"accept")]
        headers = [(b"content-type", b"application/json"), *translated.headers, *headers]
        inner = ProxyRequest(
            "POST", translated.path, translated.path.encode(), headers, body, request.arrival, request.usage_counter
        )

        async def work() -> None:
            await self._models.look_for(translated.model)
            deployment = self._models.find(translated.model)
            if request.usage_counter is not None:
                check_use(request.usage_counter.key, deployment)
            if translated.thinks:
                refuse_thinking(translated, (await self._cards.of([deployment]))[0])
            if request.usage_counter is None:  # other keys' clients use the model, too
                deployment.base.ask_to_keep(translated.keep_alive)
            await self._proxy.answer(inner, inner_client)

        return inner_client, work

    async def _load(self, request: Translated, client: Client, counter: UsageCounter | None) -> None:
        await self._models.look_for(request.model)
        deployment = self._models.find(request.model)
        if counter is not None:
            check_use(counter.key, deployment)
            if request.keep_alive == 0:
                raise RequestError(
                    f"The model {deployment.name} is not unloaded for keys of --keys, as others use it; "
                    f"{WITHOUT_LIMITS}.",
                    status=403, code="not_allowed",
                )  # fmt: skip
            await counter.admit(deployment.name)
            deployment = self._models.find(request.model)  # again, as the catalogue may have changed meanwhile
        with deployment.hold():
            if counter is None:
                deployment.base.ask_to_keep(request.keep_alive)
            if request.keep_alive != 0:
                await self._proxy.wait_until_ready(deployment, client)
        await _reply(client, loaded_answer(request, "unload" if request.keep_alive == 0 else "load"))

    async def _tags(self, client: Client, key: Key | None) -> None:
        await self._models.look_for_more()
        names = {name: one for name, one in self._models.names().items() if one.may_be_used_by(key)}
        cards = await self._cards.of(list(names.values()))
        await _reply(client, {"models": [tag(name, card) for name, card in zip(names, cards, strict=True)]})

    async def _running(self, client: Client, key: Key | None) -> None:
        ready = [one for one in self._models if one.state == "ready" and one.may_be_used_by(key)]
        cards = await self._cards.of(ready)
        lengths = await asyncio.gather(*map(_context_length, ready))
        listed = [
            running(one.name, {**card, "context_length": length or card.get("context_length")}, _expiry(one))
            for one, card, length in zip(ready, cards, lengths, strict=True)
        ]
        await _reply(client, {"models": listed})

    async def _show(self, name: str, client: Client, key: Key | None) -> None:
        await self._models.look_for(name)
        deployment = self._models.find(name)
        if key is not None:
            check_use(key, deployment)
        if deployment.base.entry.is_local:
            (card,) = await self._cards.of([deployment])
            if not card:
                raise RequestError(f"The files of {name:.200} are not here yet.", status=404, code="model_not_found")
            await _reply(client, shown({**card, "name": name}))
            return
        for replica in deployment.replicas:
            body = msgspec.json.encode({"model": replica.served_name})
            headers = [(b"content-type", b"application/json"), *replica.auth_headers()]
            with contextlib.suppress(UpstreamError):
                answer = await replica.upstream.send("POST", b"/api/show", headers, body)
                try:
                    data = await answer.read_all(_MAX_CARD_BYTES)
                    if answer.status == 200 and answer.is_whole:
                        await client.reply(200, b"application/json", data)
                        return
                finally:
                    answer.close()
        await _reply(client, shown({"name": name}))  # a server that does not know this route

    async def _pull(self, name: str, client: Client, *, streams: bool) -> None:
        """Fetch a model, and send a line for each step."""
        try:
            async with contextlib.aclosing(run_octavo("pull", "--json", "--", name)) as lines:
                async for line in lines:
                    if streams:
                        await client.line(line)
        except OctavoError as error:
            raise RequestError(str(error), status=404, code="pull_failed") from None
        self._cards.try_again()
        await self._models.look_for_more()
        await client.finish({"status": "success"}, streams=streams)

    async def _delete(self, name: str, client: Client) -> None:
        await self._models.look_for(name)
        deployment = self._models.find(name)
        try:
            async with contextlib.aclosing(run_octavo("rm", "--json", deployment.name)) as lines:
                async for _ in lines:
                    pass
        except OctavoError as error:
            raise RequestError(str(error), status=404, code="model_not_found") from None
        await self._models.look_for_more()
        await client.reply(200, b"application/json", b"")


def _translated(path: str, data: bytes) -> tuple[Translated, bytes]:
    """Return the request of OpenAI's API, and its body."""
    translated = translate(path, data)
    return translated, msgspec.json.encode(translated.body)


async def _reply(client: Client, answer: dict[str, Any]) -> None:
    await client.reply(200, b"application/json; charset=utf-8", msgspec.json.encode(answer))


async def _context_length(deployment: Deployment) -> int | None:
    """Return the context length of a running model in tokens, which its flags may set below that of its files; else
    None."""
    for replica in deployment.replicas:
        if replica.takes_requests():
            listed = await replica.listed(_LENGTH_S)
            return next((one.max_model_len for one in listed if one.id == replica.served_name), None)
    return None


def _expiry(deployment: Deployment) -> str:
    """Return the time at which the model stops without further requests."""
    model = deployment.base
    keep_s = model.keep_alive
    if keep_s is None or not model.entry.is_local:
        return NEVER
    used = time.monotonic() if model.num_held else model.last_used
    left = timedelta(seconds=max(0.0, used + keep_s - time.monotonic()))
    return (datetime.now(UTC) + left).isoformat().replace("+00:00", "Z")
