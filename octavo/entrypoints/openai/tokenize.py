"""POST /tokenize and /detokenize: text to the token ids that the model would see, and back. GET /tokenizer_info."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from octavo.engine.off_loop import run_off_loop
from octavo.entrypoints.chat.message_rendering import render_messages
from octavo.entrypoints.http.error_responses import ErrorResponse
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import ServerState, num_body_bytes, state_of
from octavo.entrypoints.openai.request_bodies import DetokenizeRequest, TokenizeRequest
from octavo.entrypoints.openai.response_bodies import DetokenizeResponse, TokenizeResponse
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer

router = Router(tags=["vLLM"])

_TOKENS_AT_ONCE = 4096


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, raw: Request) -> TokenizeResponse:
    """Return the token ids of a prompt, or of a conversation after the chat template."""
    state = state_of(raw)
    state.resolve_model(body.model)
    # The chat template has added the special tokens already.
    add_special_tokens = body.messages is None if body.add_special_tokens is None else body.add_special_tokens

    def work() -> TokenizeResponse:
        tokens = state.engine.inputs.encode(_text(state, body), add_special_tokens)
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=state.engine.config.model.max_model_len,
            tokens=tokens,
            token_strs=_names(state.engine.tokenizer, tokens) if body.return_token_strs else None,
        )

    return await run_off_loop(work, length=num_body_bytes())


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, raw: Request) -> DetokenizeResponse:
    """Return the text of token ids, including special tokens."""
    state = state_of(raw)
    state.resolve_model(body.model)
    tokenizer = state.engine.tokenizer
    text = await run_off_loop(lambda: _decode(tokenizer, body.tokens), length=len(body.tokens))
    return DetokenizeResponse(prompt=text)


@router.get(
    "/tokenizer_info",
    responses={404: {"model": ErrorResponse, "description": "The server lacks --enable-tokenizer-info-endpoint."}},
)
async def tokenizer_info(raw: Request) -> dict[str, Any]:
    """Return the tokenizer's configuration (tokenizer_config.json of a folder), with the chat template in use."""
    state = state_of(raw)
    if not state.args.enable_tokenizer_info_endpoint:
        raise RequestError(
            "This server has no /tokenizer_info: start it with --enable-tokenizer-info-endpoint.",
            status=404,
            code="not_enabled",
        )
    tokenizer, file = state.engine.tokenizer, Path(state.engine.config.model.checkpoint.tokenizer_path)
    file /= "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {**tokenizer.special_tokens_map}
    return {"tokenizer_class": type(tokenizer).__name__, **config, "chat_template": tokenizer.chat_template}


def _names(tokenizer: ModelTokenizer, token_ids: list[int]) -> list[str]:
    """Return the tokens as the vocabulary writes them. Each call holds the interpreter's lock, so none is long."""
    names = list[str]()
    for begin in range(0, len(token_ids), _TOKENS_AT_ONCE):
        names += tokenizer.convert_ids_to_tokens(token_ids[begin : begin + _TOKENS_AT_ONCE])
    return names


def _decode(tokenizer: ModelTokenizer, token_ids: list[int]) -> str:
    """Return the text of token ids. Raises `RequestError` for unknown ids."""
    num_known = len(tokenizer)
    if token_ids and max(token_ids) >= num_known:
        raise RequestError(
            f"tokens has token id {max(token_ids)}; the tokenizer's are 0 to {num_known - 1}.", param="tokens"
        )
    return str(tokenizer.decode(token_ids))


def _text(state: ServerState, body: TokenizeRequest) -> str:
    if body.messages is None:
        assert body.prompt is not None
        return body.prompt
    defaults = state.args.default_chat_template_kwargs
    return render_messages(
        state.engine.tokenizer,
        body,
        body.messages,
        body.tools,
        defaults,
        trusts_template=state.args.trust_request_chat_template,
        content_format=state.args.chat_template_content_format,
        tool_format=state.formats.tools if body.tools or any(one.tool_calls for one in body.messages) else None,
    )
