"""The errors that users see. Each message is one line: what was asked, what was found and what to do.

Any other exception that escapes is a bug in Octavo and keeps its traceback.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

# Control characters and halves of surrogate pairs. Texts from files may contain them; terminals and messages must not.
_NOT_PRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
RETRY_AFTER_S = 5  # of a 503 when nothing is known about how long it lasts
_MAX_CHARACTERS = 4000
_MAX_COMPARED = 64  # characters of a name or path that is compared with known ones


class OctavoError(Exception):
    """Base of every error that the user can fix. Command lines print it without a traceback."""


class ConfigError(OctavoError, ValueError):
    """A flag, or a combination of flags, that cannot be honoured."""


class LoadError(OctavoError):
    """A model, tokenizer or checkpoint that cannot be found, read or held in memory.

    The message may contain names from files, so it is made printable, one line, and bounded in length."""

    def __init__(self, message: str) -> None:
        line = _NOT_PRINTED.sub(" ", message)
        super().__init__(line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}...")


class RequestError(OctavoError, ValueError):
    """A refused request. Other requests are not affected.

    `param` names the wrong field, `status` is the HTTP status and `code` the OpenAI error code, if there is one. After
    `retry_after_s` the same request may succeed. `details` are for programs, in APIs whose errors have details. `allow`
    lists the route's methods in an error with status 405.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after_s: int | None = None,
        details: Mapping[str, Any] | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.details = details
        self.allow = allow


def error_type(status: int) -> str:
    """Return the type in OpenAI's error body. OpenAI has the same one for all of a client's mistakes, an unknown key or
    model among them."""
    return "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"


# Codes of errors that name none, by status.
_CODES = {
    400: "bad_request", 401: "invalid_api_key", 403: "not_allowed", 404: "not_found", 405: "method_not_allowed",
    408: "request_timeout", 409: "conflict", 413: "request_too_large", 415: "unsupported_media_type",
    422: "unprocessable", 429: "rate_limit_exceeded", 431: "head_too_large", 500: "internal_error", 502: "bad_gateway",
    503: "unavailable", 504: "gateway_timeout",
}  # fmt: skip


def error_code(status: int, param: str | None, code: str | None) -> str:
    """Return the code in an error's body, which logs and metrics name too: `code`, or else one by status."""
    return code or ("invalid_value" if status == 400 and param else _CODES.get(status, str(status)))


def aborted(stop_reason: int | str | None) -> RequestError:
    """Return the error of an aborted request without output. `stop_reason` is its completion's."""
    if stop_reason == "timeout":
        return RequestError("the request was not answered before its timeout.", status=408, code="timeout")
    return RequestError("the request was aborted before its answer.", status=503, code="aborted")


_OF_A_PROMPT = ("prompt", "prompt_embeds", "multi_modal_data", "multi_modal_uuids")


class naming_prompt:
    """Make errors about a prompt name the `field` that it comes from, and its `index`, from 0, if there are several.
    Errors that concern all prompts alike stay unchanged. A class costs less for each prompt than a generator of
    `contextmanager`."""

    __slots__ = ("_count", "_field", "_index")

    def __init__(self, field: str, index: int = 0, count: int = 1) -> None:
        self._field, self._index, self._count = field, index, count

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, RequestError):
            return
        if self._count > 1 and (error.param in _OF_A_PROMPT or error.code == "context_length_exceeded"):
            error.args = (f"{self._field}[{self._index}]: {error}",)
        if error.param == "prompt":
            error.param = self._field


class DeviceMemoryError(OctavoError):
    """A step lacked device memory. Nothing of the step was computed, and the engine goes on."""


class EngineDeadError(OctavoError):
    """The engine process has ended; the request cannot be answered by this server."""


class EngineRestartingError(EngineDeadError):
    """The engine process has ended and is being started again; try in a moment."""


class EngineStoppingError(EngineDeadError):
    """The server was told to stop before the request was answered."""


def similar(word: str, known: Collection[str]) -> str | None:
    """Return the known name that a misspelt one probably means, or None."""
    import difflib

    if len(word) > _MAX_COMPARED:
        return None
    letters = sorted(word)
    transposed = (name for name in known if sorted(name) == letters)  # in a short name this is far from similar
    close = next(iter(difflib.get_close_matches(word, known, 1, 0.8)), None) or next(transposed, None)
    longer = [name for name in known if name.startswith((f"{word}_", f"{word}-"))]  # its beginning
    return close or (longer[0] if len(longer) == 1 else None)
