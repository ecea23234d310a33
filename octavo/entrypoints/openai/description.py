"""What /openapi.json says beyond what the routes' types say: examples, streams, errors, and what each field means.

FastAPI makes the description from routes and models; `complete` adds the rest to it, once, when it is first asked for.
"""

from __future__ import annotations

from typing import Any

from octavo.sampling_params import MAX_LENGTH_PENALTY, MAX_LOGPROBS, MAX_N

OVERVIEW = """\
OpenAI's API over the model that this server serves, with vLLM's extra fields and routes.

Any OpenAI client works with it: set its base URL to this server's `/v1`. Where the server has API keys, send one as
`Authorization: Bearer KEY`. Errors have OpenAI's body, `{"error": {"message", "type", "param", "code"}}`.
"""

_ERRORS = {
    "400": "A field has a wrong type or value, the prompt does not fit, or a field is unknown or not built yet.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model here.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is not sent as `Content-Type: application/json`.",
    "429": "Too many requests wait; `Retry-After` says when to come back.",
    "500": "A bug; the server's log has the traceback.",
    "503": "The model is still being loaded, the engine has died, or the server stops; see `Retry-After`.",
}

_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk or an error as JSON, and [DONE] at the end."}},
    "required": ["data"],
}
# By path: media type, what each event or line of the stream is, what a stream looks like.
_STREAMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "/v1/completions": (
        "text/event-stream",
        _EVENT,
        'data: {"id":"cmpl-1","object":"text_completion","created":1767225600,"model":"SmolLM2-135M-Instruct",'
        '"system_fingerprint":"fp_0","choices":[{"index":0,"text":" Paris","logprobs":null,"finish_reason":null}]}\n\n'
        "data: [DONE]\n\n",
    ),
    "/v1/chat/completions": (
        "text/event-stream",
        _EVENT,
        'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1767225600,'
        '"model":"SmolLM2-135M-Instruct","system_fingerprint":"fp_0","choices":[{"index":0,"delta":'
        '{"content":"Paris"},"logprobs":null,"finish_reason":null}]}\n\ndata: [DONE]\n\n',
    ),
    "/generate": (
        "application/x-ndjson",
        {"$ref": "#/components/schemas/GenerateResponse"},
        '{"text":["The capital of France is Par"]}\n',
    ),
}

_QUESTION = [{"role": "user", "content": "Name the capital of France."}]
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "A prompt": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
        "Several prompts, streamed": {"prompt": ["Once upon a time", "Two plus two is"], "stream": True},
        "Scoring a prompt": {"prompt": "The capital of France is Paris", "max_tokens": 0, "echo": True, "logprobs": 1},
        "Beam search": {"prompt": "Once upon a time", "n": 2, "best_of": 4, "use_beam_search": True},
    },
    "/v1/chat/completions": {
        "A question": {"messages": _QUESTION},
        "Streamed, with the usage": {
            "messages": [{"role": "system", "content": "Be brief."}, *_QUESTION],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "Three answers of one seed": {"messages": _QUESTION, "n": 3, "temperature": 0.8, "seed": 7, "max_tokens": 40},
    },
    "/generate": {"A prompt": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}},
    "/tokenize": {
        "A prompt": {"prompt": "The capital of France is", "return_token_strs": True},
        "A conversation": {"messages": _QUESTION},
    },
    "/detokenize": {"Token ids": {"tokens": [504, 3575, 282, 4649, 314]}},
}

# By field of a request body, wherever it occurs: what it means, and the range that is checked behind the types.
_FIELDS: dict[str, dict[str, Any]] = {
    "model": {"description": "One of the names of GET /v1/models; may be left out."},
    "prompt": {"description": "Text or token ids; completions take lists of either too."},
    "messages": {"description": "The conversation so far."},
    "max_tokens": {"description": "Output tokens at most. Completions: 16 if left out; chat: as many as fit."},
    "max_completion_tokens": {"description": "The newer name of max_tokens."},
    "n": {"description": "Answers to each prompt.", "minimum": 1, "maximum": MAX_N},
    "best_of": {
        "description": "Answers to generate, of which the n likeliest are returned; with beam search, the beams.",
        "minimum": 1,
        "maximum": MAX_N,
    },
    "temperature": {
        "description": "0 always takes the likeliest token. Left out: as the model's makers say.",
        "minimum": 0,
    },
    "top_p": {"description": "Choose among the likeliest tokens that make up this share.", "maximum": 1},
    "top_k": {"description": "Choose among this many likeliest tokens; 0 or -1 is all.", "minimum": -1},
    "min_p": {"description": "Least probability, relative to the likeliest token.", "minimum": 0, "maximum": 1},
    "presence_penalty": {"description": "Against tokens that have come already.", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"description": "Against tokens, by how often they have come.", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"description": "Above 1 against tokens of prompt and output.", "minimum": 0},
    "seed": {"description": "Makes the answer a function of the request alone, whatever else runs."},
    "stop": {"description": "Texts that end the answer."},
    "stop_token_ids": {"description": "Tokens that end the answer."},
    "include_stop_str_in_output": {"description": "Show the stop at the end of the text."},
    "ignore_eos": {"description": "Go on after the model's end-of-sequence."},
    "min_tokens": {"description": "No end before this many tokens.", "minimum": 0},
    "logit_bias": {"description": "By token id: added to its logit, -100 to 100."},
    "allowed_token_ids": {"description": "Only these tokens may come."},
    "bad_words": {"description": "Texts that must not come."},
    "logprobs": {"description": "Log-probabilities; completions: of this many likeliest tokens, chat: whether."},
    "top_logprobs": {"description": "Chat: of this many likeliest tokens.", "minimum": 0, "maximum": MAX_LOGPROBS},
    "prompt_logprobs": {"description": "The same for the prompt's tokens.", "minimum": 0, "maximum": MAX_LOGPROBS},
    "echo": {"description": "Start the text with the prompt."},
    "stream": {"description": "Send the answer as it comes."},
    "stream_options": {"description": "What a stream carries besides text."},
    "include_usage": {"description": "A last chunk with the usage."},
    "continuous_usage_stats": {"description": "The usage so far in every chunk."},
    "truncate_prompt_tokens": {
        "description": "Keep this many of the prompt's last tokens; -1 is as many as fit.",
        "minimum": -1,
    },
    "use_beam_search": {"description": "Search for the likeliest answers instead of choosing token by token."},
    "length_penalty": {
        "description": "Beam search: above 0 favours long answers.",
        "minimum": -MAX_LENGTH_PENALTY,
        "maximum": MAX_LENGTH_PENALTY,
    },
    "early_stopping": {"description": 'Beam search: when to stop looking; true, false or "never".'},
    "skip_special_tokens": {"description": "Leave special tokens out of the text."},
    "spaces_between_special_tokens": {"description": "Put spaces between special tokens in the text."},
    "add_special_tokens": {"description": "Begin the prompt with what the tokenizer begins texts with."},
    "priority": {"description": "Lower goes first, with --scheduling-policy priority."},
    "request_id": {"description": "Becomes part of the answer's id, and comes back as header X-Request-Id."},
    "cache_salt": {"description": "Requests with different salts share no cached prompt."},
    "return_token_ids": {"description": "Add the token ids of prompt and answer."},
    "return_tokens_as_token_ids": {"description": "Write tokens as token_id:N in log-probabilities."},
    "return_token_strs": {"description": "Add the tokens as the vocabulary writes them."},
    "add_generation_prompt": {"description": "End the prompt with the beginning of an answer; true if left out."},
    "continue_final_message": {"description": "Go on with the last message instead of answering it."},
    "chat_template_kwargs": {"description": "Variables for the chat template."},
    "user": {"description": "Taken and without effect, as OpenAI documents it."},
    "metadata": {"description": "Taken and without effect, as OpenAI documents it."},
    "safety_identifier": {"description": "Taken and without effect, as OpenAI documents it."},
    "prompt_cache_key": {"description": "Taken and without effect, as OpenAI documents it."},
    "response_format": {"description": "OpenAI's way to ask for JSON, of a schema or any."},
    "structured_outputs": {"description": "vLLM's way to say what the answer must be: json, regex, choice or grammar."},
    "guided_json": {"description": "vLLM's older name of structured_outputs.json."},
    "guided_regex": {"description": "vLLM's older name of structured_outputs.regex."},
    "guided_choice": {"description": "vLLM's older name of structured_outputs.choice."},
    "guided_grammar": {"description": "vLLM's older name of structured_outputs.grammar."},
    "guided_whitespace_pattern": {"description": "With guided_json: what may stand between the parts of JSON."},
    "tools": {"description": "Functions that the answer may call."},
    "tool_choice": {"description": 'Whether to call them: "auto", "none", "required" or the one to call.'},
    "parallel_tool_calls": {"description": "Whether there may be several calls."},
    "include_reasoning": {"description": "Whether reasoning is shown, in a field of its own."},
    "timeout": {"description": "Seconds after which the answer ends with what there is."},
    "tokens": {"description": "Token ids."},
}


def complete(schema: dict[str, Any]) -> dict[str, Any]:
    """Add to FastAPI's description, in place, what it does not know."""
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _add_errors(operation)
            if path in _EXAMPLES and "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                content["examples"] = {name: {"value": value} for name, value in _EXAMPLES[path].items()}
            if path in _STREAMS:
                media_type, item, example = _STREAMS[path]
                answer = operation["responses"]["200"]
                answer["description"] = f"The answer; with `stream: true` a stream of {media_type}."
                answer["content"][media_type] = {"schema": item, "example": example}
    models = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        models.pop(name, None)
    for name, model in models.items():
        if name.endswith(("Request", "Options")):
            for field, more in _FIELDS.items():
                if field in model.get("properties", {}):
                    _describe(model["properties"][field], more)
    return schema


def _add_errors(operation: dict[str, Any]) -> None:
    """The errors that a route can answer with in the place of FastAPI's own 422."""
    responses = operation["responses"]
    responses.pop("422", None)
    if "requestBody" in operation:
        statuses = set(_ERRORS)
    else:
        statuses = {"401", "500", "503", *(["404"] if "parameters" in operation else [])}
    for status, meaning in _ERRORS.items():
        if status in statuses - responses.keys():
            error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
            responses[status] = {"description": meaning, "content": error}


def _describe(field: dict[str, Any], more: dict[str, Any]) -> None:
    field.setdefault("description", more["description"])
    for kind in field.get("anyOf", [field]):
        if kind.get("type") in ("integer", "number"):
            kind.update({key: value for key, value in more.items() if key in ("minimum", "maximum")})
