"""GET /v1/models and /v1/models/{id}: the names that this server answers to."""

from __future__ import annotations

from starlette.requests import Request

from octavo.entrypoints.openai.responses import ModelCard, ModelList
from octavo.entrypoints.openai.routes import Router
from octavo.entrypoints.openai.state import ServerState, state_of

router = Router(tags=["OpenAI"])


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """The names of the model."""
    state = state_of(request)
    return ModelList(data=[_card(state, name) for name in state.model_names])


@router.get("/v1/models/{model_id:path}")
async def get_model(model_id: str, request: Request) -> ModelCard:
    """One name of the model; names may contain slashes."""
    state = state_of(request)
    return _card(state, state.resolve_model(model_id))


def _card(state: ServerState, name: str) -> ModelCard:
    model = state.engine.config.model
    return ModelCard(id=name, created=state.created, root=model.checkpoint.name, max_model_len=model.max_model_len)
