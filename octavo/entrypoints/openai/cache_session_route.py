"""The route that frees the blocks of a `cache_session`. Requests keep them: see `request_bodies.TokenRequest`."""

from starlette.requests import Request

from octavo.entrypoints.http.pagination import Deleted
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import state_of
from octavo.errors import RequestError

router = Router(tags=["Octavo"])


@router.delete("/v1/cache/sessions/{session_id}")
async def delete_cache_session(session_id: str, raw: Request) -> Deleted:
    """Free the blocks that only this session has. `cache_salt` in the query is the salt of the session's requests."""
    state = state_of(raw)
    state.check_keeps_sessions()
    if await state.engine.drop_cache_session(session_id, raw.query_params.get("cache_salt")) is None:
        raise RequestError(f"There is no cache session {session_id!r:.100}.", status=404, code="not_found")
    return Deleted(id=session_id, object="cache.session.deleted")
