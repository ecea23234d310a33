"""The application: routes, the keys and limits in front of them, CORS, and errors."""

from __future__ import annotations

import inspect
import logging
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.azure import read_as_openai
from octavo.entrypoints import ui
from octavo.entrypoints.http import engine_control, openapi, operator_routes
from octavo.entrypoints.http.auth_and_limits import REQUEST_ID, AuthAndLimits
from octavo.entrypoints.http.error_responses import (
    CUT_OFF_HEADER,
    ERROR_CODE,
    REFUSED_NAMES,
    UNBUILT_PATHS,
    http_error_response,
    refuse_not_built,
    unexpected_error_response,
)
from octavo.entrypoints.http.request_headers import HEADERS, ID_HEADER, RequestHeaders
from octavo.entrypoints.http.router import LazyRoute, RouteSpec, make_routes
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.server_state import ServerState
from octavo.entrypoints.http.shared_counts import SharedCounts
from octavo.entrypoints.http.streaming import SERVER_SEND
from octavo.entrypoints.openai import chat_completions, completions, generate_route, lora_adapters, model_list, tokenize
from octavo.logs import UNKNOWN_ROUTE, LineLimit
from octavo.metrics.http_metrics import HttpMetrics
from octavo.metrics.load_report import load_report

if TYPE_CHECKING:
    from octavo.engine.engine_client import EngineClient

logger = logging.getLogger("octavo.server")

_ANYBODYS_STATUSES = (401, 404, 405)  # refusals that clients without a key can cause
ROUTERS = [
    module.router
    for module in (
        completions,
        chat_completions,
        model_list,
        lora_adapters,
        tokenize,
        generate_route,
        operator_routes,
        openapi,
        ui,
    )
]
# Modules that are imported with the first request for one of their routes, and not at the start.
LAZY_ROUTES = {
    "octavo.entrypoints.http.block_routes": (
        "POST /v1/cache/blocks/{fingerprint}/find",
        "POST /v1/cache/blocks/{fingerprint}/read",
    ),
    "octavo.entrypoints.http.routing_notes": ("GET /v1/routing_notes",),
    "octavo.entrypoints.batch.batch_routes": (
        "GET /v1/files",
        "POST /v1/files",
        "GET /v1/files/{file_id}",
        "DELETE /v1/files/{file_id}",
        "GET /v1/files/{file_id}/content",
        "GET /v1/batches",
        "POST /v1/batches",
        "GET /v1/batches/{batch_id}",
        "POST /v1/batches/{batch_id}/cancel",
    ),
    "octavo.entrypoints.openai.cache_session_route": ("DELETE /v1/cache/sessions/{session_id}",),
    "octavo.entrypoints.openai.stored_chat_routes": (
        "GET /v1/chat/completions",
        "GET /v1/chat/completions/{completion_id}",
        "POST /v1/chat/completions/{completion_id}",
        "DELETE /v1/chat/completions/{completion_id}",
        "GET /v1/chat/completions/{completion_id}/messages",
    ),
    "octavo.entrypoints.openai.render_routes": ("POST /v1/chat/completions/render", "POST /v1/completions/render"),
    "octavo.entrypoints.responses.responses_routes": (
        "POST /v1/responses",
        "POST /v1/responses/input_tokens",
        "GET /v1/responses/{response_id}",
        "DELETE /v1/responses/{response_id}",
        "POST /v1/responses/{response_id}/cancel",
        "GET /v1/responses/{response_id}/input_items",
    ),
    "octavo.entrypoints.responses.conversation_routes": (
        "POST /v1/conversations",
        "GET /v1/conversations/{conversation_id}",
        "POST /v1/conversations/{conversation_id}",
        "DELETE /v1/conversations/{conversation_id}",
        "GET /v1/conversations/{conversation_id}/items",
        "POST /v1/conversations/{conversation_id}/items",
        "GET /v1/conversations/{conversation_id}/items/{item_id}",
        "DELETE /v1/conversations/{conversation_id}/items/{item_id}",
    ),
    "octavo.entrypoints.pooling.pooling_routes": (
        "POST /v1/embeddings",
        "POST /v2/embed",
        "POST /pooling",
        "POST /classify",
        "POST /score",
        "POST /v1/score",
        "POST /rerank",
        "POST /v1/rerank",
        "POST /v2/rerank",
    ),
    "octavo.entrypoints.openai.invocations": ("POST /invocations",),
    "octavo.entrypoints.audio.transcription_routes": ("POST /v1/audio/transcriptions", "POST /v1/audio/translations"),
    "octavo.entrypoints.anthropic.messages_routes": ("POST /v1/messages", "POST /v1/messages/count_tokens"),
    "octavo.entrypoints.ollama_routes": (
        "GET /",
        "POST /api/chat",
        "POST /api/generate",
        "POST /api/embed",
        "POST /api/embeddings",
        "POST /api/show",
        "GET /api/tags",
        "GET /api/ps",
        "GET /api/version",
    ),
}


class _Router(Router):
    """Finds routes without patterns in a dictionary; Starlette searches a list for each request. Routes answer their
    own errors."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self.plain.get(_below(scope["root_path"], scope["path"])) if scope["type"] == "http" else None
        if route is not None and scope["method"] in (route.methods or ()):
            scope.update({"router": self, "route": route, "endpoint": route.endpoint, "path_params": {}})
            await route.app(scope, receive, send)
            return
        try:
            await super().__call__(scope, receive, send)
        except HTTPException as error:  # there is no such route, or it has not this method
            await http_error_response(Request(scope), error)(scope, receive, send)

    @cached_property
    def plain(self) -> dict[str, Route]:
        """Return the routes without patterns, by path."""
        return {route.path: route for route in self.routes if isinstance(route, Route) and "{" not in route.path}


class _Cors(CORSMiddleware):
    """Starlette's. Requests without an origin come from programs. They get only `Vary: Origin`, by `_App`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_of_page = scope["type"] != "http" or "origin" in scope[HEADERS]
        await (super().__call__ if is_of_page else self.app)(scope, receive, send)


class _App(Starlette):
    """Counts requests, and answers unexpected errors. Streams bypass Octavo's own middlewares, but not those of
    --middleware."""

    counts: HttpMetrics
    lines: LineLimit
    router: _Router
    lets_streams_past = True
    sends_ids = True

    def build_middleware_stack(self) -> ASGIApp:
        """Return the router within the middlewares. Starlette would add two for errors, which `__call__` and the routes
        answer: each costs coroutines for every request."""
        app: ASGIApp = self.router
        for one in reversed(self.user_middleware):
            app = one.cls(app, *one.args, **one.kwargs)
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.lets_streams_past:
            scope[SERVER_SEND] = send
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        read_as_openai(scope, self.state.octavo.args.root_path.rstrip("/"))
        scope["app"], scope[HEADERS] = self, RequestHeaders(scope)
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        status, has_begun, begin = 500, False, time.monotonic()

        async def send_noting(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
                asked, answer = scope[HEADERS], MutableHeaders(raw=message.setdefault("headers", []))
                if "origin" not in asked:
                    answer.add_vary_header("Origin")  # for caches
                if (own := answer.get(ID_HEADER)) is not None:  # of a route or a middleware
                    asked.request_id = own
                elif self.sends_ids:
                    answer.append(ID_HEADER, asked.request_id)
                if status == 200 and self.state.octavo.has_cut_off:
                    answer[CUT_OFF_HEADER] = "1"
                if REQUEST_ID in scope:
                    answer["request-id"] = scope[REQUEST_ID]
                if (form := asked.get("endpoint-load-metrics-format")) is not None:
                    report = load_report(form, self.state.octavo.engine.stats)
                    answer.update({} if report is None else {"endpoint-load-metrics": report})
            await send(message)

        try:
            await self.middleware_stack(scope, receive, send_noting)
        except Exception:
            if not has_begun:
                await unexpected_error_response()(scope, receive, send_noting)
            raise  # uvicorn logs it
        finally:
            scope.pop(SERVER_SEND, None)  # it refers to the scope: a cycle would stay until a full collection
            route = self._route(scope["path"])
            names = scope.get(REFUSED_NAMES, ())
            self.counts.record(scope["method"], route, status, time.monotonic() - begin, scope.get(ERROR_CODE))
            is_line = 400 <= status < 500 and names and self.state.octavo.args.logs_requests
            if is_line and (status not in _ANYBODYS_STATUSES or self.lines.admits(time.monotonic())):
                said = [str(status), *names]
                fields = {"request_id": scope[HEADERS].request_id, "status": status}
                shown = UNKNOWN_ROUTE if route == "none" else route
                text = "%s: %s %s is refused: %s"
                logger.info(text, fields["request_id"], scope["method"], shown, ", ".join(said), extra=fields)

    def _route(self, path: str) -> str:
        """Return the declared path of the route that answers `path`; "none" if there is no such route."""
        path = _below(self.state.octavo.args.root_path.rstrip("/"), path)
        if path in self.router.plain:
            return path
        return next((route.path for route in self._patterns if route.path_regex.match(path)), "none")

    @cached_property
    def _patterns(self) -> list[Route]:
        return [route for route in self.routes if isinstance(route, Route) and "{" in route.path]


def _below(root_path: str, path: str) -> str:
    """Return the path as routes declare it. A proxy may or may not have removed the root path."""
    return path[len(root_path) :] if root_path and path.startswith(root_path + "/") else path


def build_app(engine: EngineClient, args: ServerArgs, counts: SharedCounts | None = None) -> Starlette:
    """Return the application of a server with `engine`, which need not be ready yet. `counts` are shared with the
    server's other front ends."""
    state = ServerState(engine, args, counts)
    routers = [*ROUTERS, engine_control.router] if args.is_dev_mode else ROUTERS
    specs: list[RouteSpec | LazyRoute] = [one for router in routers for one in router.specs]
    specs += [LazyRoute(module, *route.split(" ")) for module, routes in LAZY_ROUTES.items() for route in routes]
    unbuilt = [Route(path, refuse_not_built, methods=["GET", "POST", "PUT", "DELETE"]) for path in UNBUILT_PATHS]
    routes = [*make_routes(specs), *unbuilt]
    app = _App()
    app.router = _Router(routes)
    vars(app.state)["octavo"] = state  # read many times a request, and `State` would keep it behind `__getattr__`
    app.counts, app.lines = state.http_metrics, LineLimit()
    app.lets_streams_past = not args.middleware
    app.sends_ids = args.enable_request_id_headers
    app.state.openapi = openapi.Description(specs)
    for middleware in reversed(args.middlewares):
        if not inspect.isclass(middleware):
            app.add_middleware(BaseHTTPMiddleware, dispatch=middleware)
        else:
            app.add_middleware(cast(Any, middleware))
    # The last middleware added is the outermost. CORS must be: it answers preflight requests, which bring no key, and
    # adds its headers to errors too.
    app.add_middleware(AuthAndLimits, state=state, routes=routes)
    app.add_middleware(_Cors, **args.cors)
    return app
