"""POST /v1/chat/completions/render and /v1/completions/render: the tokens of a request's prompts, for routers.

The answers have the first fields of vLLM's. The model does not run, but the request is checked as if it did.
"""

from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.http.body_fields import ResponseModel
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.streaming import encode_off_loop, run_until_disconnect
from octavo.entrypoints.openai.chat_completions import ChatJob
from octavo.entrypoints.openai.completions import CompletionJob
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest, CompletionRequest

router = Router(tags=["vLLM"])


class RenderedPrompt(ResponseModel):
    request_id: str
    model: str
    token_ids: list[int]


@router.post("/v1/chat/completions/render", response_model=RenderedPrompt)
async def chat_prompt_tokens(body: ChatCompletionRequest, raw: Request) -> Response:
    """Return the prompt's tokens, after the chat template."""
    with body.field_names.in_errors():
        (prompt,) = await _render(ChatJob(body, raw, only_renders=True), raw)
    return await _answer(prompt)


@router.post("/v1/completions/render", response_model=list[RenderedPrompt])
async def completion_prompt_tokens(body: CompletionRequest, raw: Request) -> Response:
    """Return the tokens of each prompt."""
    return await _answer(await _render(CompletionJob(body, raw, only_renders=True), raw))


async def _answer(found: RenderedPrompt | list[RenderedPrompt]) -> Response:
    return Response(await encode_off_loop(found), media_type="application/json")


async def _render(job: ChatJob | CompletionJob, raw: Request) -> list[RenderedPrompt]:
    """Return a `RenderedPrompt` for each prompt."""
    prompts = await run_until_disconnect(job.render(), raw.receive)
    return [
        RenderedPrompt.model_construct(request_id=job.response_id, model=job.model, token_ids=tokens)
        for tokens in prompts
    ]
