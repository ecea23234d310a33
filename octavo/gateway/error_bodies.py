"""What clients get when the gateway itself refuses: OpenAI's error body, Anthropic's below
/v1/messages, Ollama's below /api."""

import msgspec

from octavo.errors import RequestError, error_code, error_type
from octavo.messages_errors import MESSAGES_PREFIX, messages_error
from octavo.ollama import PREFIX as OLLAMA_PREFIX
from octavo.ollama import ollama_error


def error_body(error: RequestError, path: str, request_id: str) -> bytes:
    """Return the JSON body of an error, in the form of the API that `path` belongs to. Messages name the request."""
    if path.startswith(OLLAMA_PREFIX):
        return msgspec.json.encode(ollama_error(str(error)))
    if path.startswith(MESSAGES_PREFIX):
        return msgspec.json.encode(messages_error(str(error), error.status, request_id))
    code = error_code(error.status, error.param, error.code)
    fields = {"message": str(error), "type": error_type(error.status), "param": error.param, "code": code}
    return msgspec.json.encode({"error": fields})


def error_event(body: bytes, path: str) -> bytes:
    """Return the server-sent event that ends a stream with an error."""
    return (b"event: error\n" if path.startswith(MESSAGES_PREFIX) else b"") + b"data: " + body + b"\n\n"
