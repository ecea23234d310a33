"""GET /v1/models and /v1/models/{id}: the names that this server answers to, in the form of the API that asks."""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import ServerState, state_of
from octavo.entrypoints.openai.response_bodies import ModelCard, ModelList
from octavo.messages_errors import VERSION_HEADER

router = Router(tags=["OpenAI"])


@router.get("/v1/models", response_model=ModelList)
async def list_models(request: Request) -> ModelList | Response:
    """List the names of the model and its adapters, whose parent is the base model. With the header `anthropic-version`
    the list has the form of Anthropic's API."""
    state = state_of(request)
    names = [*state.model_names, *([] if state.adapters is None else state.adapters.named)]
    if VERSION_HEADER in request.headers:
        data = [_anthropic_card(state, name) for name in names]
        return JSONResponse({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})
    return ModelList(data=[_card(state, name) for name in names])


@router.get("/v1/models/{model_id:path}", response_model=ModelCard)
async def get_model(model_id: str, request: Request) -> ModelCard | ModelList | Response:
    """Return one name of the model; names may contain slashes."""
    if not model_id:  # /v1/models/
        return await list_models(request)
    state = state_of(request)
    if VERSION_HEADER in request.headers:
        return JSONResponse(_anthropic_card(state, state.resolve_model(model_id)))
    return _card(state, state.resolve_model(model_id))


def _anthropic_card(state: ServerState, name: str) -> dict[str, Any]:
    created_at = datetime.fromtimestamp(state.created, UTC).isoformat()
    card = {"type": "model", "id": name, "display_name": name, "created_at": created_at, "lifecycle": "active"}
    return {**card, "max_input_tokens": state.engine.config.model.max_model_len}


def _card(state: ServerState, name: str) -> ModelCard:
    model = state.engine.config.model
    adapter = None if state.adapters is None else state.adapters.named.get(name)
    if adapter is not None:
        return ModelCard(
            id=name, created=adapter.created, root=adapter.path,
            parent=adapter.base_model_name or state.model_names[0], max_model_len=model.max_model_len,
        )  # fmt: skip
    if name not in state.model_names:  # an adapter below --lora-root
        return ModelCard(
            id=name, created=state.created, root=name, parent=state.model_names[0], max_model_len=model.max_model_len
        )
    return ModelCard(id=name, created=state.created, root=model.checkpoint.name, max_model_len=model.max_model_len)
