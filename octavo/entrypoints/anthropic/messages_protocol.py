"""The bodies of Messages requests, with Anthropic's names (https://docs.claude.com/en/api/messages).

Fields that only concern caching, billing or labels (`cache_control`, `metadata`, `service_tier` and the like) are
accepted and change no answer. Fields that ask for missing features are refused by name.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, Tag, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from octavo.entrypoints.http.body_fields import Int, Priority, RequestBody, Text, described, refuse_unbuilt
from octavo.entrypoints.openai.answer_structure import StructuredOutputs
from octavo.entrypoints.openai.request_bodies import Resume
from octavo.errors import RequestError

_NOTE = "Taken and without effect: it changes no answer."
CacheControl = dict[str, Any]

# Fields that are not built, with the values that ask for nothing. null always asks for nothing.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "mcp_servers": ([],),
    "speed": ("standard",),
}


# What a server without threads answers. Anthropic's clients then send whole conversations.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": []}


class _Block(RequestBody):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    type: Literal["text"]
    text: Text
    citations: list[Any] | None = None


class Base64Source(RequestBody):
    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: Text


class UrlSource(RequestBody):
    type: Literal["url"]
    url: Text


class ImageBlock(_Block):
    """A picture: a PNG, JPEG, WebP or GIF file in base64, or its URL."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    @property
    def url(self) -> str:
        source = self.source
        return source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedThinkingBlock(_Block):
    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: Text | None = None


def _known_blocks(blocks: Any, *kinds: str) -> BeforeValidator:
    """Return a validator of the list type `blocks` that turns text into one block, and refuses blocks of other kinds by
    name."""

    def check(value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        if value is not None and not isinstance(value, list):
            raise ValueError("should be a string or a list of blocks")
        for block in value or ():
            kind = block.get("type") if isinstance(block, dict) else None
            if isinstance(kind, str) and kind not in kinds:
                raise ValueError(f"has a block of type {kind!r:.60}, which is not built; {', '.join(kinds)} are")
        return value

    return BeforeValidator(check, json_schema_input_type=str | blocks)


_Texts = list[TextBlock]
TextBlocks = Annotated[_Texts, _known_blocks(_Texts, "text")]
_ContentList = list[
    Annotated[Annotated[TextBlock, Tag("text")] | Annotated[ImageBlock, Tag("image")], Field(discriminator="type")]
]
_Contents = Annotated[_ContentList, _known_blocks(_ContentList, "text", "image")]


class Citations(RequestBody):
    enabled: Literal[False] | None = None


class PlainSource(RequestBody):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: Text


class ContentSource(RequestBody):
    type: Literal["content"]
    content: _Contents


class DocumentBlock(_Block):
    """A document: plain text, or blocks of text and pictures."""

    type: Literal["document"]
    source: Annotated[PlainSource | ContentSource, Field(discriminator="type")]
    title: Text | None = None
    context: Text | None = None
    citations: Citations | None = None

    @property
    def parts(self) -> list[TextBlock | ImageBlock]:
        """Return the document as the model reads it."""
        source = self.source
        inner = [_text_block(source.data)] if isinstance(source, PlainSource) else source.content
        about = {"title": self.title, "context": self.context}
        return _marked("document", about, inner)


class SearchResultBlock(_Block):
    """What a search has found: texts, with where they are from."""

    type: Literal["search_result"]
    source: Text
    title: Text
    content: Annotated[list[TextBlock], Field(min_length=1)]
    citations: Citations | None = None

    @property
    def parts(self) -> list[TextBlock | ImageBlock]:
        """Return the result as the model reads it."""
        return _marked("search_result", {"source": self.source, "title": self.title}, self.content)


def _marked(
    mark: str, about: Mapping[str, str | None], inner: Sequence[TextBlock | ImageBlock]
) -> list[TextBlock | ImageBlock]:
    """Return `inner` between marks, after the fields of `about`. Texts that follow each other become one."""
    lines = [f"<{mark}>", *(f"<{name}>{text}</{name}>" for name, text in about.items() if text)]
    blocks: list[TextBlock | ImageBlock] = []
    for block in [_text_block("\n".join(lines)), *inner, _text_block(f"</{mark}>")]:
        if isinstance(block, TextBlock) and blocks and isinstance(last := blocks[-1], TextBlock):
            blocks[-1] = _text_block(f"{last.text}\n{block.text}")
        else:
            blocks.append(block)
    return blocks


def _text_block(text: str) -> TextBlock:
    return TextBlock.model_construct(type="text", text=text)


class ToolReferenceBlock(_Block):
    """A tool that a search has found: the model sees it from then on."""

    type: Literal["tool_reference"]
    tool_name: Text

    @property
    def parts(self) -> list[TextBlock | ImageBlock]:
        """Return what the model reads."""
        return [_text_block(f"The tool {self.tool_name} can be called.")]


class ChangedTool(RequestBody):
    type: Literal["tool_reference"]
    name: Text


class ToolChangeBlock(_Block):
    """A tool that the model sees from then on, or no longer."""

    type: Literal["tool_addition", "tool_removal"]
    tool: ChangedTool


_Results = list[
    Annotated[
        Annotated[TextBlock, Tag("text")]
        | Annotated[ImageBlock, Tag("image")]
        | Annotated[DocumentBlock, Tag("document")]
        | Annotated[SearchResultBlock, Tag("search_result")]
        | Annotated[ToolReferenceBlock, Tag("tool_reference")],
        Field(discriminator="type"),
    ]
]
ResultBlocks = Annotated[
    _Results, _known_blocks(_Results, "text", "image", "document", "search_result", "tool_reference")
]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: ResultBlocks | None = None
    is_error: bool | None = None
    toolset_name: Text | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | ToolChangeBlock,
    Field(discriminator="type"),
]
_Blocks = list[Block]
Blocks = Annotated[
    _Blocks,
    _known_blocks(
        _Blocks, "text", "image", "document", "search_result", "thinking", "redacted_thinking", "tool_use",
        "tool_result", "tool_addition", "tool_removal",
    ),
]  # fmt: skip
# The roles to which blocks belong, besides texts and the assistant's.
_OWNERS = {
    **dict.fromkeys(("tool_result", "image", "document", "search_result"), "user"),
    **dict.fromkeys(("tool_addition", "tool_removal"), "system"),
}  # fmt: skip


class Message(RequestBody):
    """One turn or a part of it: adjacent messages of one role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: Blocks = Field(description="Text, or a list of blocks.")
    clear_at: Literal["next_user_message", "never"] | None = None  # when the system's text leaves the prompt

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        for block in self.content:
            of = self.role if block.type == "text" else _OWNERS.get(block.type, "assistant")
            if of != self.role:
                raise RequestError(f"a block of type {block.type} belongs to a message of the {of}.", param="messages")
        if self.clear_at is not None and self.role != "system":
            raise RequestError("clear_at belongs to a message of the system.", param="messages")
        return self


class ToolDefinition(RequestBody):
    """A function that the model may call. `type` is "custom" or left out: Anthropic's own tools are not here."""

    type: Text | None = None
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # input is streamed as far as the model's format allows
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: list[dict[str, Any]] | None = None
    defer_loading: bool | None = None  # the model sees the tool once a search or the system has named it

    @property
    def description_for_model(self) -> str | None:
        """Return the description with the examples of inputs, as templates write descriptions."""
        examples = [json.dumps(one, ensure_ascii=False) for one in self.input_examples or ()]
        parts = [self.description, *(["Examples of its input:", *examples] if examples else [])]
        return "\n".join(filter(None, parts)) or self.description

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(data, dict) and ("function" in data or kind == "function" or "parameters" in data):
            raise RequestError(
                'a tool has the form of OpenAI; here it is {"name": ..., "description": ..., "input_schema": {...}}.',
                param="tools",
            )
        if isinstance(data, dict) and "input_schema" not in data:
            raise RequestError("tools need an input_schema.", param="tools")
        return data


def _check_tools(value: Any, info: ValidationInfo) -> Any:
    """Return a list of tools without those that run at Anthropic, if the server overlooks unknown fields; else raise
    for them."""
    kept = []
    for tool in value if isinstance(value, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str) or kind in ("custom", "function"):
            kept.append(tool)
        elif info.context is None:
            said = (
                "has a tool of type {kind}, which runs at Anthropic; only custom ones are here. "
                "A server with --unknown-fields warn leaves it out"
            )
            raise PydanticCustomError("extra_forbidden", said, {"kind": f"{kind!r:.60}"})
    return kept if isinstance(value, list) else value


class ToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise RequestError("tool_choice.name goes with type tool, and only with it.", param="tool_choice.name")
        return self


class Thinking(RequestBody):
    """Whether to think, and for how many tokens, where the model's thinking ends with a token of its own."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[Int, Field(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(RequestBody):
    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unbuilt(cls, data: Any) -> Any:
        return refuse_unbuilt(data, unbuilt={"task_budget": ()}, within="output_config.")


class CountTokensRequest(RequestBody):
    """Body of POST /v1/messages/count_tokens: what a prompt is made of."""

    model: Text | None = described("One of the names of GET /v1/models; may be left out.")
    messages: Annotated[list[Message], Field(min_length=1)] = Field(
        description="The conversation so far. If its last message is the assistant's, the answer continues it."
    )
    system: TextBlocks | None = described("The system prompt: text, or blocks of it.")
    tools: Annotated[list[ToolDefinition], BeforeValidator(_check_tools)] | None = described(
        "Functions that the answer may call."
    )
    tool_choice: ToolChoice | None = described("Whether to call them.")
    thinking: Thinking | None = described("Whether to think, where the chat template can be told.")
    output_config: OutputConfig | None = described("How much effort to make, and the JSON schema of the answer.")
    context_management: dict[str, Any] | None = described("Edits; only clear_thinking_20251015 is built.")
    chat_template_kwargs: dict[str, Any] | None = described("Octavo's own: variables for the chat template.")
    reuse_answers: bool | None = described(
        "Octavo's own: put the original tokens of this server's earlier answers into the prompt; true if left out."
    )
    cache_control: CacheControl | None = described(_NOTE)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unbuilt(cls, data: Any) -> Any:
        data = refuse_unbuilt(data, unbuilt=_NOT_BUILT)
        if not isinstance(data, dict) or "thread" not in data:
            return data
        if data["thread"] is not None:
            raise RequestError(
                "thread is not built; send the whole conversation as messages.", param="thread", details=_NO_THREADS
            )
        return {name: value for name, value in data.items() if name != "thread"}


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[Int, Field(ge=1)] = Field(
        description="The most tokens to generate; as many as fit, where the model has room for fewer."
    )
    stream: bool | None = described("Send the answer as events.")
    stop_sequences: list[Text] | None = described("Texts that end the answer.")
    temperature: float | None = described("0 always takes the likeliest token.", minimum=0, maximum=2)
    top_p: float | None = described("Sample only the likeliest tokens of this total probability.", maximum=1)
    top_k: Int | None = described("Sample only from this many likeliest tokens.", minimum=-1)
    metadata: dict[str, Any] | None = described(_NOTE)
    service_tier: Literal["auto", "standard_only"] | None = described(_NOTE)
    inference_geo: Text | None = described(_NOTE)
    diagnostics: dict[str, Any] | None = described(_NOTE)
    user_profile_id: Text | None = described(_NOTE)
    priority: Priority = described("Octavo's own: lower goes first, with --scheduling-policy priority.", default=0)
    structured_outputs: StructuredOutputs | None = described(
        "Octavo's own: the answer's structure, or options such as final_check for the schema of output_config."
    )
    resume: Resume | None = described("Continue another server's stream that broke off, as octavo gateway does.")

    @model_validator(mode="after")
    def _check_resume(self) -> Self:
        if self.resume is not None and not self.stream:
            raise RequestError("resume goes with a stream.", param="resume")
        return self
