"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: load and unload adapters by name while the server runs.

Both routes work only with --enable-runtime-lora-updating, and read only below --lora-root, because a client must not
make the server read arbitrary paths.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from octavo.engine.off_loop import MAX_INLINE_LENGTH, run_off_loop
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import ServerState, state_of
from octavo.entrypoints.openai.request_bodies import LoadAdapterRequest, UnloadAdapterRequest
from octavo.errors import OctavoError, RequestError
from octavo.lora.names import AdapterNames

router = Router(tags=["vLLM"])
B = TypeVar("B", LoadAdapterRequest, UnloadAdapterRequest)


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_adapter(body: LoadAdapterRequest, raw: Request) -> Response:
    """Serve an adapter under a name. It has been read and checked when the answer comes."""
    return PlainTextResponse(await _everywhere(state_of(raw), load, "load_lora_adapter", body))


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_adapter(body: UnloadAdapterRequest, raw: Request) -> Response:
    """Stop serving an adapter. Requests under way finish with it."""
    return PlainTextResponse(await _everywhere(state_of(raw), unload, "unload_lora_adapter", body))


async def _everywhere(state: ServerState, do: Callable[[ServerState, B], Awaitable[str]], name: str, body: B) -> str:
    """Call `do` in this front end, or if there are several, through the hub in all of them."""
    _updatable(state)
    if state.hub is None:
        return await do(state, body)
    return str(await state.hub.call(name, **body.model_dump()))


async def load(state: ServerState, body: LoadAdapterRequest) -> str:
    """Serve an adapter in this front end. Returns the text of the answer."""
    names = _updatable(state)
    async with names.changing(body.lora_name):
        found = await run_off_loop(
            lambda: names.read(body.lora_name, body.lora_path, body.load_inplace), length=MAX_INLINE_LENGTH + 1
        )
        await state.engine.load_adapter(found.source)
        before = names.named.get(body.lora_name)
        names.named[body.lora_name] = found
    if before is not None and before.source.identity != found.source.identity:
        _drop(state, names, before.source.identity)
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


async def load_named(state: ServerState) -> str | None:
    """Load the adapters of --lora-modules, so that the start finds one that cannot be served. Returns the reason why it
    cannot, or None."""
    for adapter in [] if state.adapters is None else list(state.adapters.named.values()):
        try:
            await state.engine.load_adapter(adapter.source)
        except RequestError as error:
            return f"--lora-modules {adapter.name}: {error}"
        except OctavoError:  # the engine has ended, which others report
            return None
    return None


async def unload(state: ServerState, body: UnloadAdapterRequest) -> str:
    """Stop serving an adapter in this front end. Returns the text of the answer."""
    names = _updatable(state)
    async with names.changing(body.lora_name):
        gone = names.unload(body.lora_name)
    _drop(state, names, gone.source.identity)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def _drop(state: ServerState, names: AdapterNames, identity: str) -> None:
    """Free an adapter's memory if no name refers to it any more."""
    if all(one.source.identity != identity for one in names.named.values()):
        state.engine.unload_adapter(identity)


def _updatable(state: ServerState) -> AdapterNames:
    names, lora = state.adapters, state.engine.config.lora
    if names is None or lora is None or not lora.may_update:
        raise RequestError(
            "This server does not load adapters while it runs; start it with --enable-lora, --lora-root and "
            "--enable-runtime-lora-updating.",
            status=404,
            code="not_enabled",
        )
    return names
