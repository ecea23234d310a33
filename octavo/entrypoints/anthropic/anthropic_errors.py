"""Errors of Messages at the server. `octavo.messages_errors` has their form."""

from collections.abc import Mapping
from typing import Any, Literal

from octavo.entrypoints.http.body_fields import ResponseModel
from octavo.messages_errors import messages_error


class AnthropicErrorInfo(ResponseModel):
    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicError(ResponseModel):
    """The body of every answer of Messages that is not 2xx. `request_id` repeats the header `request-id`."""

    type: Literal["error"]
    error: AnthropicErrorInfo
    request_id: str


def anthropic_error(
    message: str, status: int, param: str | None, code: str | None, details: Mapping[str, Any], *, request_id: str
) -> dict[str, Any]:
    """Return the body of an error. `param` and `code` are omitted; the message has their content."""
    if code == "context_length_exceeded":  # on these words agents shorten their conversation
        counts = f"{details['num_tokens']} tokens > {details['limit']} maximum" if "num_tokens" in details else message
        return messages_error(f"prompt is too long: {counts}", status, request_id)
    return messages_error(message, status, request_id, details)
