"""POST /v1/chat/completions/render and /v1/completions/render: the tokens of a request's prompts, for routers.

The answers have the first fields of vLLM's. Nothing is computed, but the request is checked as if it were.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.entrypoints.http.body_fields import ResponseModel
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.streaming import run_until_disconnect
from octavo.entrypoints.openai.chat_completions import ChatJob
from octavo.entrypoints.openai.completions import CompletionJob
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest, CompletionRequest

router = Router(tags=["vLLM"])


class RenderedPrompt(ResponseModel):
    request_id: str
    model: str
    token_ids: list[int]


@router.post("/v1/chat/completions/render", response_model=RenderedPrompt)
async def render_chat(body: ChatCompletionRequest, raw: Request) -> Response:
    """The prompt's tokens, after the chat template."""
    with body.field_names.in_errors():
        prompts = await _render(ChatJob(body, raw, only_renders=True), raw)
    return Response(status_code=499) if prompts is None else JSONResponse(prompts[0])


@router.post("/v1/completions/render", response_model=list[RenderedPrompt])
async def render_completion(body: CompletionRequest, raw: Request) -> Response:
    """The tokens of each prompt."""
    prompts = await _render(CompletionJob(body, raw, only_renders=True), raw)
    return Response(status_code=499) if prompts is None else JSONResponse(prompts)


async def _render(job: ChatJob | CompletionJob, raw: Request) -> list[dict[str, Any]] | None:
    """Return a `RenderedPrompt` for each prompt, or None if the client has gone."""
    prompts = await run_until_disconnect(job.render(), raw.receive)
    if prompts is None:
        return None
    return [
        RenderedPrompt(request_id=job.response_id, model=job.model, token_ids=tokens).model_dump() for tokens in prompts
    ]
