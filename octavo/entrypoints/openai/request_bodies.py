"""The bodies of the API's requests, with OpenAI's names and vLLM's extra fields.

Types are checked here, ranges by `SamplingParams`, lengths by the engine. An unknown field is refused, as OpenAI
does. Each field's meaning is stated once, here and for /openapi.json.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from octavo.entrypoints.http.body_fields import (
    MAX_METADATA,
    MAX_SESSION_LENGTH,
    SESSION_PATTERN,
    Content,
    Id,
    Int,
    Priority,
    Prompt,
    Prompts,
    RequestBody,
    Text,
    Texts,
    TokenId,
    check_text,
    described,
    refuse_unbuilt,
)
from octavo.entrypoints.openai.answer_structure import ResponseFormat, StructuredOutputs
from octavo.entrypoints.openai.chat_messages import ChatMessage, Tool
from octavo.entrypoints.openai.tool_choice import AllowedToolsChoice, NamedToolChoice, ToolChoice
from octavo.errors import RequestError
from octavo.field_names import FieldNames
from octavo.request import MAX_CACHE_TTL_S
from octavo.sampling_params import (
    MAX_LENGTH_PENALTY,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    STRUCTURES,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
_IGNORED = "Accepted, and does not change the answer (as with OpenAI)."


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool | None = described("End the stream with a chunk that has the usage.")
    continuous_usage_stats: bool | None = described("Put the usage so far into every chunk.")
    include_obfuscation: Literal[False] | None = None


class Resume(RequestBody):
    """The part of a stream that another server has sent, from its header X-Octavo-Resumable and its comments."""

    id: Id
    created: Int
    seed: Int
    tokens: list[Annotated[list[TokenId], Field(min_length=1)]] = Field(description="Those of each comment.")
    prompt: Annotated[list[TokenId], Field(min_length=1)] | None = described(
        "The prompt's tokens, if a comment had them. Tokens of earlier answers may differ from their text's."
    )


class PromptRequest(RequestBody):
    @model_validator(mode="before")
    @classmethod
    def _refuse_unbuilt(cls, data: Any) -> Any:
        return refuse_unbuilt(data, cls.__pydantic_fields__)


class Prediction(RequestBody):
    """OpenAI's predicted output: a text of which the answer may largely consist, such as a file that is edited."""

    type: Literal["content"]
    content: Content


class TokenRequest(PromptRequest):
    """Fields for the choice of an answer's tokens, and for the scheduling of a request."""

    stream: bool | None = described("Send the answer as it comes.")
    # OpenAI's sampling.
    temperature: float | None = described("0 always takes the likeliest token. Left out: the model's own.", minimum=0)
    top_p: float | None = described("Sample only the likeliest tokens of this total probability.", maximum=1)
    presence_penalty: float | None = described(
        "Lowers the logits of tokens that the answer has.", minimum=-2, maximum=2
    )
    frequency_penalty: float | None = described(
        "Lowers the logits of tokens by how often the answer has them.", minimum=-2, maximum=2
    )
    seed: Int | None = described("Equal requests with equal seeds get equal answers, whatever else runs.")
    stop: Texts | None = described("Texts that end the answer.")
    logit_bias: dict[str, float] | None = described("Numbers by token id, -100 to 100, added to the tokens' logits.")
    # vLLM's sampling.
    top_k: Int | None = described("Sample only from this many likeliest tokens; 0 or -1: all.", minimum=-1)
    min_p: float | None = described(
        "Tokens below this share of the likeliest token's probability are left out.", minimum=0, maximum=1
    )
    repetition_penalty: float | None = described("Above 1 makes tokens of prompt and output less likely.", minimum=0)
    stop_token_ids: list[TokenId] | None = described("Tokens that end the answer.")
    include_stop_str_in_output: bool | None = described("Include the stop text at the end of the answer.")
    ignore_eos: bool | None = described("Continue after the model's end-of-sequence token.")
    min_tokens: Int | None = described("The answer has at least this many tokens.", minimum=0)
    skip_special_tokens: bool | None = described("Leave special tokens out of the text.")
    bad_words: list[Text] | None = described("Texts that the answer must not have.")
    allowed_token_ids: list[TokenId] | None = described("The only tokens that the answer may have.")
    # vLLM's others.
    priority: Priority = described("Lower goes first, with --scheduling-policy priority.", default=0)
    request_id: Id | None = described("Becomes part of the answer's id, and comes back as header X-Request-Id.")
    session_id: Annotated[Text, Field(min_length=1, max_length=MAX_SESSION_LENGTH)] | None = described(
        "Requests of one session go to one replica (octavo gateway) and one engine (-dp), where the load allows it; "
        "the header X-Session-ID does the same."
    )
    cache_salt: Annotated[Text, Field(min_length=1)] | None = described(
        "Requests with different salts share no cached prompt."
    )
    # Octavo's own.
    reuse_answers: bool | None = described(
        "Put the original tokens of this server's earlier answers into the prompt; true if left out."
    )
    cache_session: Annotated[str, Field(pattern=SESSION_PATTERN)] | None = described(
        "Keep the blocks of this conversation on disk (--kv-cache-disk) under this id, until DELETE "
        "/v1/cache/sessions/{id} or cache_ttl_s after its last request; the header X-Cache-Session does the same."
    )
    cache_ttl_s: Annotated[float, Field(gt=0, le=MAX_CACHE_TTL_S)] | None = described(
        "How long to keep the blocks of the cache_session; one hour if left out. The header X-Cache-TTL does the same."
    )
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = described(
        "Seconds after arrival at which the answer ends, with the tokens so far."
    )
    max_ttft: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = described(
        "Seconds after arrival in which the first token must come. The request is refused (429) if that is unlikely; "
        "with --scheduling-policy deadline it goes before requests whose first tokens are due later."
    )


class SamplingRequest(TokenRequest):
    """Further common fields of all generating routes: the number of answers, and the structure of their content."""

    max_tokens: Int | None = described(
        "Output tokens at most. Left out: 16, and in chats the model's max_new_tokens or all that fits."
    )
    n: Int | None = described("Answers to each prompt.", minimum=1, maximum=MAX_N)
    best_of: Int | None = described(
        "Answers to generate, of which the n likeliest are returned; or the number of beams.", minimum=1, maximum=MAX_N
    )
    spaces_between_special_tokens: bool | None = described("Put spaces between special tokens in the text.")
    truncate_prompt_tokens: Int | None = described("Keep this many prompt tokens; -1: all that fit.", minimum=-1)
    truncation_side: Literal["left", "right"] | None = described(
        "Keep the prompt's last tokens (left) or first (right)."
    )
    use_beam_search: bool | None = described("Search for the likeliest answers instead of choosing token by token.")
    length_penalty: float | None = described(
        "Beam search: above 0 favours long answers.", minimum=-MAX_LENGTH_PENALTY, maximum=MAX_LENGTH_PENALTY
    )
    early_stopping: bool | Literal["never"] | None = described('Beam search: when to stop; true, false or "never".')
    # What the answer must be: OpenAI's field, vLLM's, and vLLM's older ones.
    response_format: ResponseFormat | None = described("OpenAI's way to ask for JSON, with or without a schema.")
    structured_outputs: StructuredOutputs | None = described(
        "The structure of the answer: json, regex, choice, grammar or structural_tag."
    )
    guided_json: Text | dict[str, Any] | None = described("vLLM's older name of structured_outputs.json.")
    guided_regex: Text | None = described("vLLM's older name of structured_outputs.regex.")
    guided_choice: list[Text] | None = described("vLLM's older name of structured_outputs.choice.")
    guided_grammar: Text | None = described("vLLM's older name of structured_outputs.grammar.")
    structural_tag: Text | dict[str, Any] | None = described("vLLM's older name of structured_outputs.structural_tag.")
    guided_whitespace_pattern: Text | None = described("With guided_json: pattern of the blanks in the JSON.")
    prediction: Prediction | None = described("A text that the answer largely repeats, to get the same answer sooner.")
    add_special_tokens: bool | None = described("Add the tokenizer's special tokens to the prompt.")

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def structure_field(self) -> str | None:
        """Return the field that constrains the answer's content; None if there is none, or if it is the engine's own
        `structured_outputs`."""
        structure = self.structure()
        return None if structure is None or structure[0] == "structured_outputs" else structure[0]

    def structure(self) -> tuple[str, StructuredOutputsParams] | None:
        """Return the field that constrains the answer's content, and its value, or None. If `structured_outputs` has
        only options, they apply to the form that another field gives. Raises `RequestError` if several fields give a
        form."""
        found: dict[str, dict[str, Any]] = {}
        own = {} if self.structured_outputs is None else self.structured_outputs.model_dump(exclude_none=True)
        if own and any(own.get(name) not in (None, False) for name in STRUCTURES):
            found["structured_outputs"] = own
        if self.response_format is not None and self.response_format.type != "text":
            schema = self.response_format.json_schema
            if schema is not None and schema.schema_ is not None:
                # By OpenAI's rules a strict schema closes its objects itself; `strict` closes those that are open.
                # Whether objects of other schemas are closed is the engine's setting.
                closes = {"disable_additional_properties": True} if schema.strict else {}
                found["response_format.json_schema.schema"] = {"json": schema.schema_, **closes}
            elif self.response_format.type == "structural_tag":
                found["response_format"] = {"structural_tag": self.response_format.structural_tag}
            elif self.response_format.schema_ is not None:
                found["response_format.schema"] = {"json": self.response_format.schema_}
            else:
                found["response_format"] = {"json_object": True}
        for field in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"):
            if (value := getattr(self, field)) is not None:
                found[field] = {field.removeprefix("guided_"): value}
        if len(found) > 1:
            raise RequestError(f"{' and '.join(found)} exclude each other.", param=list(found)[1])
        if not found and self.structured_outputs is not None:
            found["structured_outputs"] = own
        if not found:
            if self.guided_whitespace_pattern is not None:
                raise RequestError("guided_whitespace_pattern needs guided_json.", param="guided_whitespace_pattern")
            return None
        ((field, asked),) = found.items()
        asked |= {name: value for name, value in own.items() if name not in STRUCTURES}
        if self.guided_whitespace_pattern is not None:
            asked["whitespace_pattern"] = self.guided_whitespace_pattern
        try:
            return field, StructuredOutputsParams(**asked)
        except RequestError as error:
            if field == "structured_outputs":
                raise
            names = FieldNames({f"structured_outputs.{name}": field for name in STRUCTURES})
            raise names.renamed(error) from None

    def to_sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters. `defaults` are the model's, for omitted fields. Raises `RequestError` for
        values out of range."""
        named = self.model_fields_set & _SAMPLING_FIELDS
        given = {name: value for name in named if (value := getattr(self, name)) is not None}
        if (structure := self.structure()) is not None:
            given["structured_outputs"] = structure[1]
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        if self.use_beam_search:
            defaults = {"temperature": 0.0}  # the model's defaults are for random sampling
        return SamplingParams(**{**defaults, **given, **self._own_params()}, output_kind=kind)

    def _own_params(self) -> dict[str, Any]:
        """Return parameters that the route reads in its own way."""
        return {}


class GenerationRequest(SamplingRequest):
    """Further common fields of completions and chat completions."""

    model: Text | None = described("One of the names of GET /v1/models; may be left out.")
    stream_options: StreamOptions | None = described("Options of a stream: its usage.")
    # OpenAI's notes about the caller, which by their documentation do not change the answer.
    user: Text | None = described(_IGNORED)
    metadata: dict[str, Any] | None = described(f"Comes back with a stored chat. Otherwise: {_IGNORED}")
    safety_identifier: Text | None = described(_IGNORED)
    prompt_cache_key: Text | None = described(_IGNORED)
    # vLLM's.
    prompt_logprobs: Int | None = described("Likeliest tokens to return for each prompt token; -1: all.", minimum=-1)
    logprob_token_ids: list[TokenId] | None = described(
        f"With logprobs: the tokens to return, at most {MAX_LOGPROB_TOKEN_IDS}, in place of the likeliest."
    )
    return_token_ids: bool | None = described("Return the token ids of prompt and answer.")
    return_prompt_text: bool | None = described("Return the prompt's text, in chats as the template renders it.")
    return_tokens_as_token_ids: bool | None = described("Write tokens as token_id:N in log-probabilities.")
    # Octavo's own.
    resume: Resume | None = described("Continue another server's stream that broke off, as octavo gateway does.")

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is only allowed when stream is false.", param="prompt_logprobs")
        if self.logprob_token_ids and not self.has_logprobs:
            raise RequestError("logprob_token_ids is only allowed with logprobs.", param="logprob_token_ids")
        if self.resume is not None and not self.is_resumable:
            raise RequestError(
                "resume goes with a stream of one answer to one prompt, without log-probabilities, beams and store.",
                param="resume",
            )
        return self

    def num_shown(self, num_top: int | None) -> int:
        """Return how many of a position's log-probabilities are shown; -1: all of them."""
        return -1 if self.logprob_token_ids else num_top or 0

    @property
    def is_resumable(self) -> bool:
        """Return whether another server can go on with the stream, given its tokens."""
        num_sequences = max(self.num_choices, self.best_of or 1)
        return bool(self.stream) and num_sequences == 1 and not self.has_logprobs and not self.use_beam_search

    @property
    def has_logprobs(self) -> bool:
        """Return whether the answer has log-probabilities. Completions have them with 0 too."""
        return self.logprobs is not None and self.logprobs is not False  # type: ignore[attr-defined]

    @property
    def wants_usage(self) -> bool:
        """Return whether the stream ends with a chunk with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Return whether every chunk has the usage so far."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


_SAMPLING_FIELDS = GenerationRequest.model_fields.keys() & (
    {*SamplingParams.__struct_fields__} - {"structured_outputs"}
)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompts = Field([], description="Text, token ids, or a list of either.")
    prompt_embeds: Texts | None = described(
        "Prompts that are embeddings, one or a list: tensors [tokens, hidden_size] in base64, as torch.save or "
        "safetensors write them. They come before those of prompt, which may be left out. With --enable-prompt-embeds."
    )
    echo: bool | None = described("Start the text with the prompt.")
    suffix: Text | None = described("Text after the answer: the model fills in the middle, if it was trained to.")
    logprobs: Int | None = described(
        "Log-probabilities of this many likeliest tokens, 20 at most unless --max-logprobs says otherwise; -1: of all."
    )

    @model_validator(mode="before")
    @classmethod
    def _needs_a_prompt(cls, data: Any) -> Any:
        """Check that there is a prompt. Beside embeddings an empty prompt counts as none, as in vLLM."""
        if not isinstance(data, dict):
            return data
        if data.get("prompt_embeds"):
            is_empty = "prompt" in data and data["prompt"] in (None, "", [])
            return {name: value for name, value in data.items() if name != "prompt"} if is_empty else data
        if (
            "prompt" not in data and not {"messages", "input"} & data.keys()
        ):  # else the error names the other API's field
            raise RequestError("prompt is required.", param="prompt")
        return data

    @model_validator(mode="after")
    def _check_embeds(self) -> Self:
        if self.prompt_embeds and self.echo:
            raise RequestError("echo repeats a prompt's text, and prompt_embeds have none.", param="echo")
        if self.suffix and (self.echo or not all(isinstance(prompt, str) for prompt in self.prompts)):
            raise RequestError("suffix goes with prompts that are text, without echo.", param="suffix")
        return self

    @property
    def is_resumable(self) -> bool:
        return super().is_resumable and len(self.prompts) == 1 and not self.only_prompt

    @property
    def prompts(self) -> list[str | list[int] | dict[str, Any]]:
        """Return the prompts, those given as embeddings first."""
        return [*({"prompt_embeds": given} for given in self.prompt_embeds or ()), *self.prompt]

    @property
    def only_prompt(self) -> bool:
        """Return whether the prompt is only scored: `max_tokens` is 0 and nothing is generated."""
        return self.max_tokens == 0

    def _own_params(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"max_tokens": 16 if self.max_tokens is None else self.max_tokens or 1}
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                fields["prompt_logprobs"] = self.logprobs
        return fields


class TemplateRequest(PromptRequest):
    """Fields for rendering the messages of a conversation."""

    add_generation_prompt: bool | None = described("End the prompt with the beginning of an answer; true if left out.")
    continue_final_message: bool | None = described("Continue the last message instead of answering it.")
    chat_template: str | None = described(
        "Replaces the model's template: Jinja, or the name of one of the model's. Needs --trust-request-chat-template."
    )
    chat_template_kwargs: dict[str, Any] | None = described("Variables for the chat template.")
    tools: list[Tool] | None = described("Functions and custom tools that the answer may call.")

    def refuse_template_fields(self, instead: str) -> None:
        """Raise `RequestError` for a field that only applies to messages, if the request has `instead` of messages."""
        for name in TemplateRequest.model_fields:
            if getattr(self, name) is not None:
                raise RequestError(f"{name} is for messages; {instead} has no chat template.", param=name)

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
            )
        return self


_CHAT_NAMES = FieldNames({"logprobs": "top_logprobs"})
_CHAT_NAMES_WITH_NEW_LIMIT = FieldNames({"logprobs": "top_logprobs", "max_tokens": "max_completion_tokens"})


class ChatCompletionRequest(GenerationRequest, TemplateRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)] = Field(description="The conversation so far.")
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = described("The newer name of max_tokens.")
    logprobs: bool | None = described("Whether to add log-probabilities.")
    top_logprobs: Annotated[Int, Field(ge=-1)] | None = described(
        "Log-probabilities of this many likeliest tokens, 20 at most unless --max-logprobs says otherwise; -1: of all."
    )
    tool_choice: ToolChoice = described(
        'Whether to call tools: "auto", "none", "required", the one to call, or some of them.'
    )
    parallel_tool_calls: bool | None = described("Whether an answer may have several calls.")
    thinking_token_budget: Annotated[Int, Field(ge=0)] | None = described(
        "The most tokens of reasoning; then its end mark is forced."
    )
    echo: bool | None = described("Begin the answer with the text of the last message, if that is the assistant's.")
    include_reasoning: bool | None = described("Whether reasoning is shown, in a field of its own.")
    reasoning_effort: Effort | None = described(
        "How much to reason, if the chat template has a variable for it: reasoning_effort, or enable_thinking or "
        'thinking, which the value "none" switches off.'
    )
    store: bool | None = described("Keep the answer at /v1/chat/completions/{id}. Only for n = 1.")
    verbosity: Verbosity | None = described("How long the answer is to be, if the chat template has this variable.")

    def _own_params(self) -> dict[str, Any]:
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return {"max_tokens": max_tokens} | ({"logprobs": self.top_logprobs or 0} if self.logprobs else {})

    @property
    def field_names(self) -> FieldNames:
        """Return the fields that errors about sampling parameters are to name."""
        return _CHAT_NAMES if self.max_completion_tokens is None else _CHAT_NAMES_WITH_NEW_LIMIT

    @property
    def is_resumable(self) -> bool:
        return super().is_resumable and not self.store  # clients may not choose the id of a stored chat

    @property
    def forces_calls(self) -> bool:
        """Return whether the answer must be calls."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)

    @cached_property
    def chosen_tools(self) -> dict[str, dict[str, Any]]:
        """Return, by name, the schemas of the arguments of the functions that may be called."""
        if self.tool_choice == "none":
            return {}
        return {tool.function.name: tool.function.schema_of_arguments for tool in self.tools or ()}

    @cached_property
    def custom_inputs(self) -> dict[str, str | None]:
        """Return the custom tools by name, with the Lark grammar of their inputs if they have one."""
        return {tool.custom.name: tool.custom.grammar for tool in self.tools or () if tool.custom is not None}

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
        if self.store:
            self._check_store()
        if self.tools or self.tool_choice:
            self._apply_tool_choice()
        return self

    def _check_store(self) -> None:
        if self.num_choices > 1:
            raise RequestError("store keeps one answer; n must be 1.", param="store")
        metadata = self.metadata or {}
        if len(metadata) > MAX_METADATA or not all(isinstance(value, str) for value in metadata.values()):
            raise RequestError(
                f"metadata of a stored chat are {MAX_METADATA} texts at most, by name.", param="metadata"
            )
        for text in (*metadata, *metadata.values()):
            try:
                check_text(text)
            except ValueError as error:
                raise RequestError(f"metadata {error}.", param="metadata") from None

    def _apply_tool_choice(self) -> None:
        """Check the tools and the choice. Of `allowed_tools` take the mode as the choice, and drop other tools."""
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise RequestError("tools must have different names.", param="tools")
        choice = self.tool_choice
        if choice is None or choice == "none":
            return
        if not names:
            raise RequestError("tool_choice needs tools; give some, or leave it out.", param="tool_choice")
        chosen = [choice] if isinstance(choice, NamedToolChoice) else []
        if isinstance(choice, AllowedToolsChoice):
            chosen = choice.allowed_tools.tools
        allowed, kinds = (
            {one.function.name for one in chosen},
            {one.function.name: one.type for one in self.tools or ()},
        )
        for one in chosen:
            if kinds.get(name := one.function.name) != one.type:
                said = (
                    f"{name!r}, which is not in tools"
                    if name not in kinds
                    else f"{name!r} as {one.type}, which it is not"
                )
                raise RequestError(f"tool_choice names {said}.", param="tool_choice")
        if isinstance(choice, AllowedToolsChoice):
            self.tools = [tool for tool in self.tools or () if tool.function.name in allowed]
            self.tool_choice = choice = choice.allowed_tools.mode
        structure = None if choice == "auto" else self.structure()
        # OpenAI's format is the format of a message, which an answer of calls does not have.
        if structure is not None and not structure[0].startswith("response_format"):
            raise RequestError(f"{structure[0]} and tool_choice exclude each other.", param=structure[0])


class GenerateRequest(SamplingRequest):
    """Body of POST /generate."""

    prompt: Prompt = Field(description="Text or token ids.")


class TokenizeRequest(TemplateRequest):
    """Body of POST /tokenize: a prompt, or the messages of a chat, with the options of a request for an answer."""

    model: Text | None = described("One of the names of GET /v1/models; may be left out.")
    prompt: Text | None = described("A text.")
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = described("A conversation.")
    add_special_tokens: bool | None = described("Begin the prompt with the tokenizer's start tokens.")
    return_token_strs: bool | None = described("Add the tokens as the vocabulary writes them.")

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        if self.messages is None:
            self.refuse_template_fields("a prompt")
        return self


class LoadAdapterRequest(RequestBody):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: Text = Field(description="The name by which requests ask for the adapter, as their model.")
    lora_path: Text = Field(
        description="The adapter's folder or .gguf file, below a folder of --lora-root, where a relative path begins."
    )
    load_inplace: bool = Field(default=False, description="Replace an adapter of the same name.")


class UnloadAdapterRequest(RequestBody):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Text = Field(description="The adapter's name.")
    lora_int_id: int | None = described("vLLM's number of the adapter; it is ignored.")


class DetokenizeRequest(RequestBody):
    """Body of POST /detokenize."""

    model: Text | None = described("One of the names of GET /v1/models; may be left out.")
    tokens: list[TokenId] = Field(description="Token ids.")
