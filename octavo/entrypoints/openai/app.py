"""The FastAPI application: routes, the gate in front of them, CORS, and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from octavo.entrypoints import ui
from octavo.entrypoints.openai import chat, completions, description, generate, health, models, tokenize
from octavo.entrypoints.openai.errors import add_error_handlers
from octavo.entrypoints.openai.gate import Gate
from octavo.entrypoints.openai.responses import ErrorResponse
from octavo.entrypoints.openai.server_args import ServerArgs
from octavo.entrypoints.openai.state import ServerState
from octavo.entrypoints.openai.streaming import SERVER_SEND
from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncLLMEngine


class _App(FastAPI):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SERVER_SEND] = send
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        return self.openapi_schema or description.complete(super().openapi())


def build_app(engine: AsyncLLMEngine, args: ServerArgs) -> FastAPI:
    """The application of a server that answers with `engine`, which need not be ready yet."""
    state = ServerState(engine, args)
    app = _App(
        title="Octavo",
        version=__version__,
        description=description.OVERVIEW,
        responses={500: {"model": ErrorResponse, "description": "A bug; the server's log has the traceback."}},
        docs_url=None,
        redoc_url=None,
    )
    app.state.octavo = state
    for module in (completions, chat, models, tokenize, generate, health, description, ui):
        app.include_router(module.router)
    add_error_handlers(app)
    # The last one added is the outermost: CORS answers preflight requests, which bring no key, and marks errors too.
    app.add_middleware(Gate, state=state)
    app.add_middleware(
        CORSMiddleware, allow_origins=args.origins, allow_methods=["*"], allow_headers=["*"], allow_credentials=False
    )
    return app
