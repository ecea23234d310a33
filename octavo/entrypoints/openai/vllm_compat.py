"""The functions of vLLM's `api_server` that other programs call: a server in the program's own event loop, or an
application for it.

    parser = make_arg_parser(FlexibleArgumentParser())
    asyncio.run(run_server(parser.parse_args()))
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.types import Receive, Scope, Send

from octavo.compat.usage import UsageContext
from octavo.config import AsyncEngineArgs
from octavo.engine.async_engine import AsyncLLMEngine
from octavo.entrypoints.cli.serve import both_args
from octavo.entrypoints.http import app as octavo_app
from octavo.entrypoints.http import server
from octavo.entrypoints.http.error_responses import error_response
from octavo.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from octavo.entrypoints.utils import cli_env_setup
from octavo.errors import ConfigError
from octavo.flags import FlagParser as FlexibleArgumentParser

if TYPE_CHECKING:
    from octavo.engine.engine_client import EngineClient

__all__ = [
    "FlexibleArgumentParser",
    "build_app",
    "build_async_engine_client",
    "build_async_engine_client_from_engine_args",
    "cli_env_setup",
    "init_app_state",
    "make_arg_parser",
    "run_server",
    "validate_parsed_serve_args",
]
_DECORATORS = frozenset({"delete", "get", "head", "options", "patch", "post", "put", "api_route", "include_router"})


async def run_server(args: argparse.Namespace, **uvicorn_kwargs: Any) -> None:
    """Run `octavo serve` in the running loop, with the result of a parser of `make_arg_parser`, until SIGINT, SIGTERM,
    or the cancellation of the task. Raises `OctavoError` if the server cannot start."""
    if uvicorn_kwargs:
        names = ", ".join(sorted(uvicorn_kwargs))
        raise ConfigError(f"run_server takes no arguments for uvicorn, got {names}; use the server's flags.")
    await server.serve(*both_args(args))


@contextlib.asynccontextmanager
async def build_async_engine_client(
    args: argparse.Namespace,
    *,
    usage_context: UsageContext | None = None,
    disable_frontend_multiprocessing: bool = False,
) -> AsyncIterator[AsyncLLMEngine]:
    """Yield an engine made from parsed arguments when it is ready, and shut it down at the end. Raises
    `ConfigError`."""
    async with build_async_engine_client_from_engine_args(
        both_args(args)[0],
        usage_context=usage_context,
        disable_frontend_multiprocessing=disable_frontend_multiprocessing,
    ) as engine:
        yield engine


@contextlib.asynccontextmanager
async def build_async_engine_client_from_engine_args(
    engine_args: AsyncEngineArgs,
    *,
    usage_context: UsageContext | None = None,
    disable_frontend_multiprocessing: bool = False,
) -> AsyncIterator[AsyncLLMEngine]:
    """Do the same as `build_async_engine_client` with existing engine arguments."""
    if disable_frontend_multiprocessing:
        raise ConfigError("disable_frontend_multiprocessing is not built: the engine has a process of its own.")
    engine = AsyncLLMEngine.from_engine_args(engine_args, usage_context=usage_context)
    try:
        await engine.wait_ready()
        yield engine
    finally:
        engine.shutdown()


class _Application(Starlette):
    """An application with the program's own routes and middlewares before the server's."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request that none of the program's routes matches to the server, wherever the program has mounted the
        application."""
        served = getattr(self.state, "octavo_app", None)
        if served is None:
            served = error_response("the server has no engine yet; await init_app_state(engine, app.state, args).", 503)
        mounted, path = scope.get("root_path", ""), scope["path"]
        if mounted and path.startswith(mounted + "/"):
            path = path[len(mounted) :]
        await served({**scope, "root_path": "", "path": path}, receive, send)

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError` with advice for names of FastAPI, the class of vLLM's application. Python calls this
        only for missing names."""
        advice = ": app.add_route(path, function, methods=[...]) adds a route" if name in _DECORATORS else ""
        raise AttributeError(f"this application is Starlette's and has no {name}{advice}.", name=name, obj=self)


def build_app(
    args: argparse.Namespace, supported_tasks: tuple[str, ...] | None = None, model_config: object = None
) -> Starlette:
    """Return the application, for any ASGI server. It answers after `init_app_state` has given it an engine. vLLM's
    other arguments are ignored, as they follow from the engine. Raises `ConfigError`."""
    both_args(args)[1].check()
    app = _Application()
    app.router.default = app.serve
    return app


async def init_app_state(
    engine_client: EngineClient, *given: Any, state: State | None = None, args: argparse.Namespace | None = None,
    vllm_config: object = None, supported_tasks: object = None,
) -> None:  # fmt: skip
    """Give an application its engine: `(engine, app.state, args)`. Earlier versions of vLLM pass a configuration in
    between, newer ones the tasks at the end; both follow from the engine."""
    for one in given:
        state = one if isinstance(one, State) else state
        args = one if isinstance(one, argparse.Namespace) else args
    if state is None or args is None:
        raise TypeError("init_app_state() takes an engine, the application's state and parsed arguments.")
    state.engine_client = engine_client
    state.octavo_app = octavo_app.build_app(engine_client, both_args(args)[1])
