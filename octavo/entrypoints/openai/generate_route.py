"""POST /generate: vLLM's plain route. It takes one prompt with flat sampling parameters, and returns prompt and answer
as one text.

A stream has a line of JSON for each step, with the whole text so far; an error is a line with the error body.
"""

from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.http.error_responses import error_body, error_fields
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import PreparedPrompt, state_of
from octavo.entrypoints.http.streaming import EventStream, encode_json, respond
from octavo.entrypoints.openai.completions import prompt_text
from octavo.entrypoints.openai.request_bodies import GenerateRequest
from octavo.entrypoints.openai.response_bodies import GenerateResponse
from octavo.outputs import RequestOutput

router = Router(tags=["vLLM"])


class LineStream(EventStream):
    """Lines of JSON instead of server-sent events."""

    media_type = "application/x-ndjson"
    keep_alive = b""  # JSON lines have no comments


@router.post("/generate", response_model=GenerateResponse)
async def generate(body: GenerateRequest, raw: Request) -> Response:
    """Continue one prompt."""
    state = state_of(raw)
    params = body.to_sampling_params(state.engine.config.model.default_sampling_params)
    response_id, headers = state.response_id("gen", body, raw)
    prepared = PreparedPrompt(body.prompt, body.add_special_tokens is not False)
    prompt, outputs = await state.submit(
        response_id, body, params, lambda: prepared, clamps_max_tokens=body.max_tokens is None
    )
    start = await prompt_text(state.engine.tokenizer, prompt, is_cut=body.truncate_prompt_tokens is not None)
    texts = [start] * body.num_choices
    if body.stream:
        return LineStream(_lines(texts, outputs), headers)
    return await respond(_collect(texts, outputs), raw, headers)


async def _collect(texts: list[str], outputs: AsyncGenerator[RequestOutput, None]) -> GenerateResponse:
    async for output in outputs:
        for completion in output.outputs:
            texts[completion.index] += completion.text
    return GenerateResponse(text=texts)


async def _lines(texts: list[str], outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[bytes, None]:
    try:
        async for output in outputs:
            for completion in output.outputs:
                texts[completion.index] += completion.text
            yield encode_json({"text": texts}) + b"\n"
    except Exception as error:
        yield error_body(**error_fields(error)) + b"\n"
    finally:
        await outputs.aclose()
