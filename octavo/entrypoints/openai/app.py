"""The application: routes, the gate in front of them, CORS, and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from octavo.entrypoints import ui
from octavo.entrypoints.openai import chat, completions, description, generate, health, models, tokenize
from octavo.entrypoints.openai.errors import add_error_handlers
from octavo.entrypoints.openai.gate import Gate
from octavo.entrypoints.openai.server_args import ServerArgs
from octavo.entrypoints.openai.state import ServerState
from octavo.entrypoints.openai.streaming import SERVER_SEND

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncLLMEngine


ROUTERS = [module.router for module in (completions, chat, models, tokenize, generate, health, description, ui)]


class _App(Starlette):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SERVER_SEND] = send
        await super().__call__(scope, receive, send)


def build_app(engine: AsyncLLMEngine, args: ServerArgs) -> Starlette:
    """The application of a server that answers with `engine`, which need not be ready yet."""
    state = ServerState(engine, args)
    declared = [one for router in ROUTERS for one in router.declared]
    app = _App(routes=[one.route() for one in declared])
    app.state.octavo = state
    app.state.openapi = description.Description(declared)
    add_error_handlers(app)
    # The last one added is the outermost: CORS answers preflight requests, which bring no key, and marks errors too.
    app.add_middleware(Gate, state=state)
    app.add_middleware(
        CORSMiddleware, allow_origins=args.origins, allow_methods=["*"], allow_headers=["*"], allow_credentials=False
    )
    return app
