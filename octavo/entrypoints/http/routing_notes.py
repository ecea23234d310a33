"""The route for gateways: which prompts gateways have sent here, how large the cache is, and which adapters are on the
device."""

from typing import Any

from starlette.requests import Request

from octavo.config import EngineConfig
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import state_of

router = Router(tags=["Octavo"], include_in_schema=False)


@router.get("/v1/routing_notes")
async def routing_notes(raw: Request) -> dict[str, Any]:
    """Return the notes after those that the reader has, by `id` and `after` of the query."""
    state, id, said = state_of(raw), raw.query_params.get("id", ""), raw.query_params.get("after", "")
    after = int(said) if said.isdecimal() and len(said) < 20 else 0
    if state.hub is None:
        notes, resident = state.prompt_notes.read(id, after), state.engine.stats.resident_adapters
    else:
        notes, resident = await state.hub.call("read_notes", id=id, after=after)
    named = [] if state.adapters is None else state.adapters.named
    adapters = {name: name in resident for name in (*named, *resident)}
    return {**notes, "adapters": adapters, "cache_tokens": _cache_tokens(state.engine.config)}


def _cache_tokens(config: EngineConfig) -> int:
    """Return how many tokens of prompts the prefix cache holds; 0 if prompts stay elsewhere too, or in no cache."""
    cache = config.cache
    if cache.disk is not None or cache.host_bytes or not cache.enable_prefix_caching:
        return 0
    return (cache.num_gpu_blocks or 0) * cache.block_size * config.data_parallel_size
