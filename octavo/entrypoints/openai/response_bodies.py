"""The bodies of the API's responses. Chunks of streams, made once a token, are written by `streaming` without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer


class Body(BaseModel):
    """Pydantic makes a class's serializer when the first object of it is made, not while the server starts."""

    model_config = ConfigDict(defer_build=True)


class ErrorInfo(Body):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Body):
    """Body of every answer that is not 2xx."""

    error: ErrorInfo


class AnthropicErrorInfo(Body):
    type: str
    message: str


class AnthropicError(Body):
    """That of Messages."""

    type: Literal["error"]
    error: AnthropicErrorInfo


class ModelCard(Body):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Body):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class PromptTokensDetails(Body):
    cached_tokens: int = 0


class CompletionTokensDetails(Body):
    """What came of the request's prediction."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Body):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = Field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails = Field(default_factory=CompletionTokensDetails)


class PromptLogprob(Body):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[Mapping[int, PromptLogprob] | None]


class CompletionLogprobs(Body):
    """One entry a token in each list; a prompt's first token has no log-probability."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] = Field(default_factory=list)


class CompletionChoice(Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None  # with return_token_ids
    prompt_token_ids: list[int] | None = None


class CompletionResponse(Body):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatTopLogprob(Body):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Body):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Body):
    """`reasoning` is a newer name of `reasoning_content`. What there is none of is left out."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        optional = ("reasoning_content", "reasoning", "tool_calls")
        return {name: value for name, value in fields.items() if value is not None or name not in optional}


class ChatChoice(Body):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None  # with return_token_ids


class ChatCompletionResponse(Body):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None  # with return_token_ids; all choices have the same


class GenerateResponse(Body):
    """Each text is the prompt and what continues it. A stream's lines are the same, as far as they have come."""

    text: list[str]


class TokenizeResponse(Body):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Body):
    prompt: str
