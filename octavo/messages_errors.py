"""The error body of Anthropic's Messages API, for the server and the gateway
(https://docs.claude.com/en/api/errors)."""

from collections.abc import Mapping
from typing import Any

# Errors have this form at paths with this prefix, and for requests with this header, as at a mistyped path.
MESSAGES_PREFIX = "/v1/messages"
VERSION_HEADER = "anthropic-version"  # all clients of Anthropic's API send it
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def messages_error(
    message: str, status: int, request_id: str, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return `{"type": "error", "error": {...}, "request_id": ...}`."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if details:
        error["details"] = dict(details)
    return {"type": "error", "error": error, "request_id": request_id}
