"""The log lines of a request as it begins and as it ends, for the server and `AsyncLLMEngine`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.request import EngineRequest

if TYPE_CHECKING:
    from octavo.engine.output_processor import RequestState

_logger = logging.getLogger(__name__)
_MAX_CHARS = 200
_MAX_ITEMS = 32


def shown_id(external_id: str, engine_id: str) -> str:
    """Return the id by which the client knows a request. The server appends the engine's id, because clients may repeat
    theirs."""
    return external_id.removesuffix(f"-{engine_id}")


def log_request(
    logger: logging.Logger, external_id: str, request: EngineRequest, max_length: int | None, response_id: str = ""
) -> None:
    """Log a request. `max_length` limits the prompt's shown characters or token ids; 0 shows none. The text can
    be searched for both the request's id and the `response_id`."""
    prompt = request.prompt
    said = prompt.token_ids if prompt.text is None else prompt.text
    shown = "" if max_length == 0 else f": {said[:max_length]!r}{'...' if len(said[:max_length]) < len(said) else ''}"
    options = brief(msgspec.to_builtins(request.params))
    options.pop("output_kind", None)  # the front end's choice, not the client's
    fields = _ids(external_id, request)
    name = fields["request_id"]
    if response_id:
        fields["response_id"] = response_id
        name = response_id if response_id.endswith(name) else f"{name} ({response_id})"
    fields |= {"num_prompt_tokens": len(prompt.token_ids), "sampling_params": options}
    logger.info("%s: %d prompt tokens%s %s", name, len(prompt.token_ids), shown, options, extra=fields)


def log_end(state: RequestState) -> None:
    """Log a request that has ended: its times, tokens and finish reason. A time that it never reached is None."""
    times = state.metrics.intervals()
    seconds = [times.get(name) for name in ("e2e", "time_in_queue", "time_to_first_token")]
    tokens = len(state.request.prompt.token_ids), state.num_cached_tokens, state.num_tokens
    fields = _ids(state.external_id, state.request) | {"finish_reason": state.finish_reason}
    fields |= zip(("total_s", "queue_s", "ttft_s"), seconds, strict=True)
    fields |= zip(("num_prompt_tokens", "num_cached_tokens", "num_output_tokens"), tokens, strict=True)
    _logger.info(
        "%s: %s after %s (queue %s, first token %s), %d prompt tokens (%d cached), %d output tokens",
        fields["request_id"], state.finish_reason, *("none" if one is None else f"{one:.3f} s" for one in seconds),
        *tokens, extra=fields,
    )  # fmt: skip


def _ids(external_id: str, request: EngineRequest) -> dict[str, Any]:
    return {"request_id": shown_id(external_id, request.request_id), "engine_request_id": request.request_id}


def brief(value: Any) -> Any:
    """Return `value` as a log shows it: the beginnings of long texts, and the lengths of long lists and maps."""
    if isinstance(value, str):
        return value if len(value) <= _MAX_CHARS else f"{value[:_MAX_CHARS]}... ({len(value)} characters)"
    if isinstance(value, list | tuple | dict) and len(value) > _MAX_ITEMS:
        return f"({len(value)} items)"
    if isinstance(value, dict):
        return {brief(name): brief(one) for name, one in value.items()}
    return [brief(one) for one in value] if isinstance(value, list | tuple) else value
