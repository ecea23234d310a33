"""`octavo run`, `ps` and `stop`: use, list and unload models that a server at an address has, or that `run` serves."""

import argparse
import asyncio
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec

from octavo.entrypoints.cli import command, run_command
from octavo.entrypoints.cli.local import fetch_with_bar, print_table, size_text
from octavo.entrypoints.cli.terminal import ApiClient, NoServerError, add_server_flags, make_chat_parser, talk
from octavo.errors import OctavoError
from octavo.flags import FlagParser
from octavo.gateway.catalogue import ModelEntry
from octavo.gateway.serve_process import ServeProcess
from octavo.loading.checkpoint import is_hub_id
from octavo.loading.default_model import DEFAULT_MODEL_NAME
from octavo.loading.local_models import find_local, local_models


class _Loaded(msgspec.Struct):
    """An entry of Ollama's /api/ps."""

    name: str
    expires_at: Annotated[datetime, msgspec.Meta(tz=True)]
    size: int = 0
    context_length: int | None = None


class _LoadedList(msgspec.Struct):
    models: list[_Loaded]


class _Unloaded(msgspec.Struct):
    """The answer of Ollama's /api/generate to `keep_alive` 0."""

    done_reason: str


def make_run_parser(prog: str) -> FlagParser:
    parser = make_chat_parser(prog)
    parser.usage = "%(prog)s [MODEL [MESSAGE]] [--flags]"
    parser.description = (
        "Talk to MODEL: a name of `octavo list`, a hub id, a folder or a .gguf file; by default the default model. "
        "MESSAGE asks one question, as --quick does. If the server at --url has the model, it answers. Otherwise the "
        "model is fetched if it is not here, and served while you talk, with flags of octavo serve. Ctrl-C stops an "
        "answer, Ctrl-D ends the chat."
    )
    return parser


def make_ps_parser(prog: str) -> FlagParser:
    return add_server_flags(
        FlagParser(prog=prog, description="List the models that a server has loaded, and a gateway's others.")
    )


def make_stop_parser(prog: str) -> FlagParser:
    parser = add_server_flags(FlagParser(prog=prog, description="Have a gateway unload a model."))
    parser.add_argument("asked", metavar="MODEL", help="Name of `octavo ps`.")
    return parser


def run(argv: Sequence[str] | None = None, *, prog: str = "octavo run") -> int:
    """Chat with a model, which is served meanwhile if need be. Return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # MODEL comes first: the parser cannot tell it from the value of a flag that it does not know.
    asked: list[str] = []
    while words and len(asked) < 2 and not words[0].startswith("-"):
        asked.append(words.pop(0))
    args, serve_words = make_run_parser(prog).parse_known_args(words)

    def chat() -> None:
        if asked and args.model:
            raise OctavoError(f"two models are given: {asked[0]} and --model {args.model}.")
        if len(asked) == 2:
            if args.quick is not None:
                raise OctavoError("two messages are given: leave --quick out.")
            args.quick = asked[1]
        if asked and not asked[0].strip():  # as of a variable that is not set
            raise OctavoError("the model's name is empty.")
        args.model = args.model or next(iter(asked), DEFAULT_MODEL_NAME)
        if _is_served(args):
            if serve_words:
                raise OctavoError(
                    f"{args.model} is served at {args.url} already, with its own flags: leave {' '.join(serve_words)} "
                    "out, or give another --url."
                )
            talk(args)
            return
        with _serving(args.model, serve_words) as server:
            args.url, args.api_key = f"{server.address}/v1", server.api_key
            talk(args)

    return run_command(chat)


@command(make_ps_parser, "octavo ps")
def ps(args: argparse.Namespace) -> None:
    """Print the loaded models, and a gateway's others with their state."""
    rows = [("NAME", "SIZE", "CONTEXT", "UNTIL")]
    client = ApiClient(args, needs_model=False)
    for loaded in client.ask_for(_LoadedList, "GET", "/api/ps", from_root=True).models:
        left_s = round((loaded.expires_at - datetime.now(UTC)).total_seconds())
        left = "stays" if loaded.expires_at.year == 9999 else f"{left_s} s"
        size = size_text(loaded.size) if loaded.size else ""  # of an adapter its model's row has it
        rows.append((loaded.name, size, str(loaded.context_length or ""), left))
    for one in client.models():
        if one.state != "ready" and one.id == one.root:  # else it is another name
            rows.append((one.id, "", "", one.state))
    print_table(rows)


@command(make_stop_parser, "octavo stop")
def stop(args: argparse.Namespace) -> None:
    """Unload a model."""
    body = {"model": args.asked, "keep_alive": 0}
    answer = ApiClient(args, needs_model=False).ask_for(_Unloaded, "POST", "/api/generate", body, from_root=True)
    if answer.done_reason != "unload":
        raise OctavoError(f"{args.url} does not unload models: it answered {answer.done_reason}.")
    print(f"{args.asked} stops, once its requests have ended.")


def _is_served(args: argparse.Namespace) -> bool:
    """Return whether the model is served at --url."""
    try:
        return ApiClient(args, needs_model=False).has_model(args.model)
    except NoServerError:
        return False


@contextmanager
def _serving(model: str, words: Sequence[str]) -> Iterator[ServeProcess]:
    """Serve a model during the block, in a child process. Its log is read by an event loop in a thread, so that Ctrl-C
    reaches the chat."""
    found = find_local(model, local_models())
    if found is None and is_hub_id(model):
        fetch_with_bar(model)
        found = find_local(model, local_models())
    entry = ModelEntry(model=model if found is None else found.path)
    print(f"Loading {model} ...", file=sys.stderr)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    starting = asyncio.run_coroutine_threadsafe(ServeProcess.start(model, entry, words), loop)
    try:
        yield starting.result()
    finally:
        asyncio.run_coroutine_threadsafe(_end(starting), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(starting: Any) -> None:
    """Stop the server, whether it is ready or not, and wait for the tasks that read its log."""
    if not starting.done():
        starting.cancel()
    elif not starting.cancelled() and starting.exception() is None:
        await starting.result().stop()
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
