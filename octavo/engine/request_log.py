"""The line in the log of each request for text, written when it ends, for the server and `AsyncLLMEngine`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from octavo.engine.output_processor import RequestState

_logger = logging.getLogger(__name__)
_MAX_CHARS = 200
_MAX_ITEMS = 32


def shown_id(external_id: str, engine_id: str) -> str:
    """Return the id by which the client knows a request. The server appends the engine's id, because clients may repeat
    theirs."""
    return external_id.removesuffix(f"-{engine_id}")


def log_request(state: RequestState, max_length: int | None) -> None:
    """Log a request that has ended: its times, tokens, finish reason, prompt and parameters. A time that it never
    reached is None. `max_length` limits the prompt's shown characters or token ids; 0 shows none. The line can be
    searched for the request's id and for its `response_id`."""
    request = state.request
    prompt, response_id = request.prompt, request.response_id
    request_id = name = shown_id(state.external_id, request.request_id)
    fields: dict[str, Any] = {"request_id": request_id, "engine_request_id": request.request_id}
    if response_id:
        fields["response_id"] = response_id
        name = response_id if response_id.endswith(request_id) else f"{request_id} ({response_id})"
    said = prompt.token_ids if prompt.text is None else prompt.text
    shown = ""
    if max_length != 0:
        fields["prompt"] = said[:max_length]
        shown = f": {fields['prompt']!r}{'...' if len(fields['prompt']) < len(said) else ''}"
    options = brief(msgspec.to_builtins(request.params))
    options.pop("output_kind", None)  # the front end's choice, not the client's
    times = state.metrics.intervals()
    seconds = [times.get(name) for name in ("e2e", "time_in_queue", "time_to_first_token")]
    tokens = len(prompt.token_ids), state.num_cached_tokens, state.num_tokens
    fields |= {"finish_reason": state.finish_reason, "sampling_params": options}
    fields |= zip(("total_s", "queue_s", "ttft_s"), seconds, strict=True)
    fields |= zip(("num_prompt_tokens", "num_cached_tokens", "num_output_tokens"), tokens, strict=True)
    error = ""
    if state.error is not None:
        fields["error"] = str(state.error)
        error = f": {state.error}"
    _logger.info(
        "%s: %s after %s (queue %s, first token %s), %d prompt tokens (%d cached), %d output tokens%s %s%s",
        name, state.finish_reason, *("none" if one is None else f"{one:.3f} s" for one in seconds), *tokens, shown,
        options, error, extra=fields,
    )  # fmt: skip


def brief(value: Any) -> Any:
    """Return `value` as a log shows it: the beginnings of long texts, and the lengths of long lists and maps."""
    if isinstance(value, str):
        return value if len(value) <= _MAX_CHARS else f"{value[:_MAX_CHARS]}... ({len(value)} characters)"
    if isinstance(value, list | tuple | dict) and len(value) > _MAX_ITEMS:
        return f"({len(value)} items)"
    if isinstance(value, dict):
        return {brief(name): brief(one) for name, one in value.items()}
    return [brief(one) for one in value] if isinstance(value, list | tuple) else value
