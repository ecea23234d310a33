"""The error body of Anthropic's API (https://docs.claude.com/en/api/errors)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from octavo.entrypoints.http.body_fields import ResponseModel
from octavo.field_names import FieldNames

PREFIX = "/v1/messages"  # paths with this prefix have errors of this form
# Names of the chat's fields in errors.
_NAMES = FieldNames({
    "stop": "stop_sequences",
    "tools[].function.name": "tools[].name",
    "tools[].function.description": "tools[].description",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function.strict": "tools[].strict",
    "tool_choice.function.name": "tool_choice.name",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
})  # fmt: skip
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrorInfo(ResponseModel):
    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicError(ResponseModel):
    """The body of every answer of Messages that is not 2xx. `request_id` is the header `request-id` again."""

    type: Literal["error"]
    error: AnthropicErrorInfo
    request_id: str


def anthropic_error(
    message: str, status: int, param: str | None, code: str | None, details: Mapping[str, Any], *, request_id: str
) -> dict[str, Any]:
    """Return `{"type": "error", "error": {...}}`. `param` and `code` are omitted; the message has their content."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": _NAMES.in_text(message)}
    if code == "context_length_exceeded":  # agents know these words, and shorten their conversation
        counts = f"{details['num_tokens']} tokens > {details['limit']} maximum" if "num_tokens" in details else message
        error["message"] = f"prompt is too long: {counts}"
    elif details:
        error["details"] = dict(details)
    return {"type": "error", "error": error, "request_id": request_id}
