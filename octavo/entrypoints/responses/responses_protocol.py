"""The bodies of Responses requests, with OpenAI's names and those of vLLM's sampling fields.

Items of `input` are read by `items`. Fields that ask for something that is not built are refused by name.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from starlette.requests import Request

from octavo.entrypoints.http.body_fields import Int, JsonObject, Metadata, RequestBody, Text, described, refuse_unbuilt
from octavo.entrypoints.openai.answer_structure import StructuredOutputs
from octavo.entrypoints.openai.request_bodies import Effort, Resume, TokenRequest, Verbosity
from octavo.entrypoints.openai.tool_choice import FlatToolChoice
from octavo.entrypoints.responses.items import KINDS
from octavo.entrypoints.responses.response_tools import Tools
from octavo.errors import RequestError

_NOTE = "Accepted, and does not change the answer (as with OpenAI)."
MAX_TOP_LOGPROBS = 20

# Fields of the API that are not built, with the values that ask for nothing. null always does.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "context_management": ([],),
    "enable_response_messages": (False,),
    "image": (),
    "moderation": (),
    "previous_input_messages": ([],),
    "previous_response": (),
    "prompt": (),
}
_INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")
# These ask for nothing: items have the pictures of messages anyway, and there are no calls of built-in tools.
_IDLE_INCLUDES = frozenset((
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "web_search_call.action.sources", "web_search_call.results",
))  # fmt: skip


class NamedConversation(RequestBody):
    """The conversation with this id."""

    id: Text


class TextFormat(RequestBody):
    """The form of the answer's text."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise RequestError("text.format.schema goes with type json_schema, and only with it.", param="text.format")
        return self


class TextOptions(RequestBody):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class Reasoning(RequestBody):
    """How much to reason. With a `summary` the reasoning is shown as summary parts, unshortened."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(RequestBody):
    include_obfuscation: Literal[False] | None = None


def _check_includes(value: Any) -> Any:
    for one in value if isinstance(value, list) else ():
        if isinstance(one, str) and one not in _INCLUDES and one not in _IDLE_INCLUDES:
            raise ValueError(f"has {one!r:.60}, which is not built; {' and '.join(_INCLUDES)} are")
    return value


def refuse_include(raw: Request) -> None:
    """Raise `RequestError` if a query asks for more of stored items than they have."""
    query = raw.query_params
    if wanted := {*query.getlist("include"), *query.getlist("include[]")} - _IDLE_INCLUDES:
        said = f"include {min(wanted)!r:.60} is not built here: items already have everything that was kept."
        raise RequestError(said, param="include")


def _check_input(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("should be a string or a list of items")
    if value == []:
        raise ValueError("should not be empty")
    return value


_Items = Annotated[list[dict[str, Any]], Field(min_length=1)]
Input = Annotated[str | list[Any], PlainValidator(_check_input, json_schema_input_type=str | _Items)]


class ResponsesRequest(TokenRequest):
    """Body of POST /v1/responses."""

    model: Text | None = described("One of the names of GET /v1/models; may be left out.")
    input: Input = Field(description=f"Text, or items: {', '.join(KINDS)}.")
    instructions: Text | None = described("The system's first message. It is not carried over to the next response.")
    previous_response_id: Text | None = described("The stored response that this request continues.")
    conversation: Text | NamedConversation | None = described(
        "The stored conversation to continue, or its id. The input and the answer are added to it."
    )
    store: bool | None = described("Keep the response, so that it can be retrieved and continued; true if left out.")
    background: bool | None = described("Return at once, and compute the answer in the background.")
    metadata: Metadata | None = described("Comes back with the response.")
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = described("The most tokens, including reasoning.")
    text: TextOptions | None = described("The form and the length of the answer's text.")
    tools: Tools | None = described(
        "Functions and custom tools that the answer may call, namespaces of them, and a search for tools by the client."
    )
    tool_choice: FlatToolChoice = described(
        'Whether to call tools: "auto", "none", "required", the one to call, or some of them.'
    )
    parallel_tool_calls: bool | None = described("Whether an answer may have several calls.")
    reasoning: Reasoning | None = described("How much to reason, and how to show it.")
    include: Annotated[list[Text], BeforeValidator(_check_includes)] | None = described(
        "message.output_text.logprobs; reasoning.encrypted_content, which is the reasoning in base64."
    )
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = described(
        "Log-probabilities of this many likeliest tokens."
    )
    truncation: Literal["auto", "disabled"] | None = described(
        "auto: leave out the oldest turns of a conversation that does not fit."
    )
    stream_options: ResponseStreamOptions | None = described("include_obfuscation may be false.")
    max_tool_calls: Int | None = described("A limit of built-in tools, which Octavo does not have.")
    user: Text | None = described(_NOTE)
    safety_identifier: Text | None = described(_NOTE)
    prompt_cache_key: Text | None = described(_NOTE)
    client_metadata: dict[str, Any] | None = described(_NOTE)
    access_programs: Any = described(_NOTE)
    # vLLM's.
    structured_outputs: StructuredOutputs | None = described("Structure of the answer: json, regex, choice or grammar.")
    chat_template_kwargs: dict[str, Any] | None = described("Variables for the chat template.")

    # Octavo's own.
    resume: Resume | None = described("Continue another server's stream that broke off, as octavo gateway does.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_parts(cls, data: Any) -> Any:
        return refuse_unbuilt(data, unbuilt=_NOT_BUILT)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.background and self.store is False:
            raise RequestError("background needs store: the response is fetched later.", param="background")
        if self.conversation is not None and self.previous_response_id is not None:
            raise RequestError("conversation and previous_response_id exclude each other.", param="conversation")
        if self.resume is not None and (not self.is_resumable or not re.fullmatch("resp_[0-9a-f]{32}", self.resume.id)):
            raise RequestError(
                "resume goes with the id of a response and a stream, not in the background and without "
                "log-probabilities.", param="resume",
            )  # fmt: skip
        return self

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, NamedConversation) else self.conversation

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def is_resumable(self) -> bool:
        """Return whether another server can go on with the stream, given its tokens."""
        return bool(self.stream) and not self.background and not self.wants_logprobs

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
