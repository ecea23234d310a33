"""The bodies of the API's requests and responses, with OpenAI's names and vLLM's extra fields.

Types are checked strictly here ("5" is no number), ranges by `SamplingParams`, lengths by the engine. A field of either
API that is not built yet is refused by name unless its value asks for nothing; a field that nobody knows is refused as
OpenAI does. Chunks of streams are written by `streaming`, not from models: they are made once a token.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from octavo.errors import RequestError
from octavo.sampling_params import MAX_LOGPROBS, RequestOutputKind, SamplingParams, StructuredOutputsParams

ID_PATTERN = r"^[!-~]{1,200}$"  # printable ASCII: it becomes a header and part of an id

# Fields of OpenAI's or vLLM's API that are not built, with the values that ask for nothing. null always does.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_decoding_backend": ("auto", "guidance"),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_retention": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}


def refuse_unbuilt(data: Any, built: Container[str] = ()) -> Any:
    """Take the fields of `_NOT_BUILT` out of a request body, or refuse the first that asks for something. A field that
    is `built` for this route stays."""
    if not isinstance(data, dict):
        return data
    unbuilt = [name for name in data if name in _NOT_BUILT and name not in built]
    for name in unbuilt:
        value = data[name]
        if value is not None and not any(type(value) is type(idle) and value == idle for idle in _NOT_BUILT[name]):
            raise RequestError(f"{name} is not built yet; leave it out.", param=name)
    return {name: value for name, value in data.items() if name not in unbuilt} if unbuilt else data


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("should be valid Unicode, without lone surrogates") from None
    return text


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# An integer that fits what comes after: the wire and the arrays have 64 bits.
Int = Annotated[int, Field(ge=-(2**63), lt=2**64)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, AfterValidator(_check_text)]
Texts = Annotated[list[Text], BeforeValidator(_as_list)]
Id = Annotated[str, Field(pattern=ID_PATTERN)]


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def _check_prompt(value: Any) -> list[str | list[int]]:
    """A list of prompts, each text or token ids, out of the four forms that the API knows."""
    prompts = [value] if isinstance(value, str) or (value and _is_token_ids(value)) else value
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) or _is_token_ids(prompt) for prompt in prompts):
        raise ValueError("should be a string, a list of token ids, or a list of strings or of lists of token ids")
    if not prompts:
        raise ValueError("should not be empty")
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_text(prompt)
    return prompts


_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _TOKEN_IDS_SCHEMA,
                {"type": "array", "items": _TOKEN_IDS_SCHEMA, "minItems": 1},
            ]
        }
    ),
]


def _check_one_prompt(value: Any) -> str | list[int]:
    if isinstance(value, str):
        return _check_text(value)
    if not value or not _is_token_ids(value):
        raise ValueError("should be a string or a list of token ids")
    return list(value)


Prompt = Annotated[
    str | list[int],
    PlainValidator(_check_one_prompt),
    WithJsonSchema({"anyOf": [{"type": "string"}, _TOKEN_IDS_SCHEMA]}),
]


def _check_content(value: Any) -> str:
    """Text, or the joined text of a list of parts. Lines are what vLLM joins parts by."""
    if isinstance(value, str):
        return _check_text(value)
    if not isinstance(value, list):
        raise ValueError("should be a string or a list of parts of type text")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"has a part of type {kind!r}, which is not built yet; only text is")
        if kind is None or not isinstance(part.get("text"), str):
            raise ValueError('should be a string or a list of parts like {"type": "text", "text": "..."}')
        texts.append(_check_text(part["text"]))
    return "\n".join(texts)


Content = Annotated[
    str,
    PlainValidator(_check_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
            ]
        }
    ),
]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Request):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class FunctionDefinition(_Request):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return {"type": "object", "properties": {}} if self.parameters is None else self.parameters


class Tool(_Request):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(_Request):
    name: Text


class NamedToolChoice(_Request):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


class SentFunctionCall(_Request):
    name: Text
    arguments: Text


class SentToolCall(_Request):
    """A call in a message that is sent back."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: SentFunctionCall
    index: int | None = None  # of a stream's deltas


class ChatMessage(_Request):
    """One message of a conversation. What came back in an answer may be sent again, so null fields are dropped."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: list[SentToolCall] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("function_call"):
            raise RequestError("messages with function_call are not built; use tool_calls.", param="messages")
        if data.get("tool_calls") and data.get("role") != "assistant":
            raise RequestError("only messages of the assistant have tool_calls.", param="messages")
        if data.get("content") is None and (data.get("tool_calls") or data.get("reasoning_content")):
            data = {**data, "content": ""}
        return {name: value for name, value in data.items() if name in cls.model_fields or value not in (None, [])}


class StructuredOutputs(_Request):
    """What an answer must be: one of `json`, `regex`, `choice`, `grammar` and `json_object`, with vLLM's options."""

    model_config = ConfigDict(strict=True, extra="forbid", serialize_by_alias=True)

    json_: Text | dict[str, Any] | None = Field(None, alias="json")
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: Text | None = None


class JsonSchemaFormat(_Request):
    """OpenAI's wrapping of a schema. It is always followed to the letter, `strict` or not."""

    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Request):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError(
                "response_format.json_schema goes with type json_schema, and only with it.",
                param="response_format.json_schema",
            )
        return self


class SamplingRequest(_Request):
    """What every route that generates has in common: sampling, and how the request is treated on its way."""

    stream: bool | None = None
    # OpenAI's sampling.
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int | None = None
    stop: Texts | None = None
    logit_bias: dict[str, float] | None = None
    # vLLM's sampling.
    best_of: Int | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: list[Text] | None = None
    allowed_token_ids: list[TokenId] | None = None
    truncate_prompt_tokens: Int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    # What the answer must be: OpenAI's field, vLLM's, and vLLM's older ones.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Text | dict[str, Any] | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None
    # vLLM's others.
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    request_id: Id | None = None
    cache_salt: Annotated[Text, Field(min_length=1)] | None = None
    # Octavo's own: seconds from arrival after which the request ends with what it has.
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unbuilt(cls, data: Any) -> Any:
        return refuse_unbuilt(data, cls.model_fields)

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def structure_field(self) -> str | None:
        """The field that says what the answer must be; None where the engine's own names are the request's."""
        structure = self.structure()
        return None if structure is None or structure[0] == "structured_outputs" else structure[0]

    def structure(self) -> tuple[str, StructuredOutputsParams] | None:
        """The field that says what the answer must be, and what it says. Raises `RequestError` if several do."""
        found: dict[str, dict[str, Any]] = {}
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs.model_dump(exclude_none=True)
        if self.response_format is not None and self.response_format.type != "text":
            schema = self.response_format.json_schema
            if schema is not None and schema.schema_ is not None:
                found["response_format.json_schema.schema"] = {"json": schema.schema_}
            else:
                found["response_format"] = {"json_object": True}
        for name in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{name}")) is not None:
                found[f"guided_{name}"] = {name: value}
        if len(found) > 1:
            raise RequestError(f"{' and '.join(found)} exclude each other.", param=list(found)[1])
        if not found:
            if self.guided_whitespace_pattern is not None:
                raise RequestError("guided_whitespace_pattern needs guided_json.", param="guided_whitespace_pattern")
            return None
        ((field, asked),) = found.items()
        if self.guided_whitespace_pattern is not None:
            asked["whitespace_pattern"] = self.guided_whitespace_pattern
        return field, StructuredOutputsParams(**asked)

    def _sampling_params(self, defaults: Mapping[str, Any], **fields: Any) -> SamplingParams:
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name, None)) is not None}
        if (structure := self.structure()) is not None:
            given["structured_outputs"] = structure[1]
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        if self.use_beam_search:
            defaults = {"temperature": 0.0}  # the model's own are for choosing at random
        return SamplingParams(**{**defaults, **given, **fields}, output_kind=kind)


class GenerationRequest(SamplingRequest):
    """What completions and chat completions have in common beside that."""

    model: Text | None = None
    stream_options: StreamOptions | None = None
    # OpenAI's notes about the caller, which by their documentation do not change the answer.
    user: Text | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    # vLLM's.
    prompt_logprobs: Int | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is only allowed when stream is false.", param="prompt_logprobs")
        return self

    @property
    def wants_usage(self) -> bool:
        """A last chunk with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """The usage so far in every chunk."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


_SAMPLING_FIELDS = [
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationRequest.model_fields and name != "structured_outputs"
]


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompts
    max_tokens: Int | None = None
    echo: bool | None = None
    logprobs: Int | None = None
    return_token_ids: bool | None = None

    @property
    def only_prompt(self) -> bool:
        """`max_tokens` 0: score the prompt and generate nothing."""
        return self.max_tokens == 0

    def to_sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """`defaults` are the model's, for what is left out. Raises `RequestError` for values out of range."""
        fields: dict[str, Any] = {"max_tokens": 16 if self.max_tokens is None else self.max_tokens or 1}
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                fields["prompt_logprobs"] = self.logprobs
        return self._sampling_params(defaults, **fields)


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Int | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
            )
        self._check_tools()
        return self

    def to_sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """`defaults` are the model's, for what is left out. Raises `RequestError` for values out of range."""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        fields: dict[str, Any] = {"max_tokens": max_tokens}
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        return self._sampling_params(defaults, **fields)

    @property
    def chosen_tools(self) -> dict[str, dict[str, Any]]:
        """The schemas of the arguments of the functions that may be called, by name."""
        if self.tool_choice == "none":
            return {}
        return {tool.function.name: tool.function.schema_of_arguments for tool in self.tools or ()}

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise RequestError("tools must have different names.", param="tools")
        choice = self.tool_choice
        if choice is None or choice == "none":
            return
        if not names:
            raise RequestError("tool_choice needs tools.", param="tool_choice")
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise RequestError(
                f"tool_choice names {choice.function.name!r}, which is not in tools.", param="tool_choice"
            )
        if choice != "auto" and (structure := self.structure()) is not None:
            raise RequestError(f"{structure[0]} and tool_choice exclude each other.", param=structure[0])


class GenerateRequest(SamplingRequest):
    """Body of POST /generate."""

    prompt: Prompt
    max_tokens: Int | None = None

    def to_sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """`defaults` are the model's, for what is left out. Raises `RequestError` for values out of range."""
        return self._sampling_params(defaults, **({} if self.max_tokens is None else {"max_tokens": self.max_tokens}))


class TokenizeRequest(_Request):
    """Body of POST /tokenize: a prompt, or the messages of a chat, with what would be done to them."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unbuilt(cls, data: Any) -> Any:
        return refuse_unbuilt(data, cls.model_fields)

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name) is not None:
                raise RequestError(f"{name} is for messages; a prompt has no chat template.", param=name)
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
            )
        return self


class DetokenizeRequest(_Request):
    """Body of POST /detokenize."""

    model: Text | None = None
    tokens: list[TokenId]


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """Body of every answer that is not 2xx."""

    error: ErrorInfo


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = Field(default_factory=PromptTokensDetails)


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[Mapping[int, PromptLogprob] | None]


class CompletionLogprobs(BaseModel):
    """One entry a token in each list; a prompt's first token has no log-probability."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] = Field(default_factory=list)


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None  # with return_token_ids
    prompt_token_ids: list[int] | None = None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatTopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(BaseModel):
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


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None


class ChatCompletionResponse(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class GenerateResponse(BaseModel):
    """Each text is the prompt and what continues it. A stream's lines are the same, as far as they have come."""

    text: list[str]


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    prompt: str
