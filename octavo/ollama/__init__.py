"""Ollama's HTTP API in the words of OpenAI's, for the server and the gateway.

`to_openai` turns a request into one of OpenAI's API, `answers` turns the answer back, `cards` writes what Ollama says
about models. Nothing of the engine is imported. The API: https://docs.ollama.com/api.
"""

from octavo.errors import RequestError
from octavo.field_names import FieldNames

PREFIX = "/api/"
# Options, by the fields of OpenAI's API that they become.
OPTIONS = {
    "max_tokens": "num_predict", "seed": "seed", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p",
    "min_p": "min_p", "repetition_penalty": "repeat_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "stop": "stop",
}  # fmt: skip
# Names of OpenAI's fields in errors.
_NAMES = FieldNames({
    **{field: f"options.{option}" for field, option in OPTIONS.items()},
    "logprobs": "top_logprobs",
    "response_format": "format",
    "response_format.json_schema.schema": "format",
    "reasoning_effort": "think",
    "truncate_prompt_tokens": "truncate",
    # Prompts are cut unless the client has switched that off, or it does not help.
    "shorten it, or set truncate_prompt_tokens": "shorten it",
    "shorten it, or set truncate_prompt_tokens to -1": "shorten it",
})  # fmt: skip
# The version of Ollama's API that these routes follow. Editors refuse servers that answer less than what they need.
API_VERSION = "0.12.6"
GREETING = "Ollama is running"  # the answer to HEAD and GET /, the first request of `ollama list` and others
# A header of translated requests. With "auto" a chat that is too long loses its oldest turns, with "disabled" it is
# refused. Both lower a number of tokens that does not fit.
TRUNCATION_HEADER = "x-octavo-truncation"
# Ollama's routes that Octavo does not have.
UNBUILT = frozenset(("/api/create", "/api/copy", "/api/push", "/api/blobs"))


def ollama_error(message: str) -> dict[str, str]:
    """Return the body of an answer that is not 2xx, and the last line of a stream that breaks."""
    return {"error": _NAMES.in_text(message)}


def plain_name(name: str) -> str:
    """Return a model's name without what Ollama's clients put around it: the hub's host and the tag `latest`."""
    for host in ("hf.co/", "huggingface.co/"):
        name = name.removeprefix(host)
    return name.removesuffix(":latest")


def refuse_unbuilt(path: str) -> None:
    """Raise `RequestError` for a path of Ollama's API that is not built."""
    raise RequestError(unbuilt_message(path), status=404)


def unbuilt_message(path: str) -> str:
    return f"{path:.200} is not built; docs/gateway.md lists Ollama's routes that are."
