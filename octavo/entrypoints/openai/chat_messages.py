"""The messages of a chat, and the functions that its answer may call, as requests give them."""

from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError

from octavo.entrypoints.chat.media_parts import check_role, media_of
from octavo.entrypoints.http.body_fields import JsonObject, MessageContent, RequestBody, Text, check_text
from octavo.entrypoints.openai.custom_tools import CustomDefinition, as_arguments
from octavo.errors import RequestError
from octavo.structured_output.schema_keywords import without_nulls


class FunctionDefinition(RequestBody):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @cached_property
    def schema_of_arguments(self) -> dict[str, Any]:
        if self.parameters is None:
            return {"type": "object", "properties": {}}
        try:
            return without_nulls(self.parameters)  # type: ignore[no-any-return]
        except RecursionError:
            return self.parameters  # is refused for its depth


class Tool(RequestBody):
    """A function, or a custom tool and the function that the model sees."""

    type: Literal["function", "custom"]
    cache_control: dict[str, Any] | None = None  # a note for caches of other servers
    custom: CustomDefinition | None = Field(None, validate_default=True)
    function: FunctionDefinition = Field(default=None, validate_default=True)

    @field_validator("custom", "function", mode="before")
    @classmethod
    def _check_kind(cls, value: Any, info: ValidationInfo) -> Any:
        is_of_kind = info.data.get("type", "function") == info.field_name
        if is_of_kind and value is None:
            raise PydanticKnownError("missing")
        if not is_of_kind and value is not None:
            raise ValueError(f"goes with type {info.field_name}, and only with it")
        if is_of_kind or info.field_name == "custom":
            return value
        if (custom := info.data.get("custom")) is None:  # its own error is reported
            return {"name": "custom"}
        # Inputs are held to a grammar as arguments to a strict schema.
        strict = True if custom.grammar is not None else None
        return {
            "name": custom.name, "description": custom.description, "parameters": custom.parameters, "strict": strict
        }  # fmt: skip

    def for_template(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude_none=True)
        if self.function.parameters is not None:
            function["parameters"] = self.function.schema_of_arguments
        return {"type": "function", "function": function}


class _SentBack(RequestBody):
    """A part of an answer that is sent back. Null fields are dropped, known or not."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict):
            # The openai package's `parse` adds `parsed_arguments` to calls.
            return {name: one for name, one in data.items() if one is not None and name != "parsed_arguments"}
        return data


class SentFunctionCall(_SentBack):
    name: Text
    arguments: Text | JsonObject | None = None  # blank or null: none


class SentToolCall(_SentBack):
    """A call in a message that is sent back."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: SentFunctionCall
    index: int | None = None  # of a stream's deltas

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, data: Any) -> Any:
        """Turn the call of a custom tool into that of the function that the model sees."""
        if not isinstance(data, dict) or data.get("type") != "custom":
            return data
        call = data.get("custom")
        if not isinstance(call, dict) or not all(isinstance(call.get(name), str) for name in ("name", "input")):
            raise ValueError('should have "custom": {"name": ..., "input": ...}')
        for name in ("name", "input"):
            try:
                check_text(call[name])
            except ValueError as e:
                raise ValueError(f"has a custom.{name} that {e}") from None
        function = {"name": call["name"], "arguments": as_arguments(call["input"])}
        rest = {name: one for name, one in data.items() if name != "custom"}
        return {**rest, "type": "function", "function": function}


_USUAL = frozenset(("role", "content"))
# Fields of answers that tell the model no more than the content does. The openai package's `parse` adds `parsed`.
_SHOWN_ONLY = ("annotations", "refusal", "parsed")


class ChatMessage(RequestBody):
    """One message of a conversation. Messages of answers may be sent back, so null fields are dropped."""

    role: Annotated[str, Field(min_length=1), AfterValidator(check_text)]  # any role: the template decides
    content: MessageContent
    name: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: list[SentToolCall] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None

    @property
    def text(self) -> str:
        """The text of the content, without other parts."""
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict) or (data.keys() <= _USUAL and data.get("role") != "assistant"):
            return data
        if data.get("function_call"):
            raise RequestError("messages with function_call are not built; use tool_calls.", param="messages")
        if data.get("tool_calls") and data.get("role") != "assistant":
            raise RequestError("only messages of the assistant have tool_calls.", param="messages")
        if data.get("audio"):
            raise RequestError("audio of messages is not built; send what was said as content.", param="messages")
        if data.get("role") == "assistant":
            refusal = data.get("refusal")
            data = {"content": None, **{name: one for name, one in data.items() if name not in _SHOWN_ONLY}}
            if refusal is not None and not data["content"]:
                data["content"] = refusal
        if "cache_control" in data:  # a note for caches of other servers
            data = {name: value for name, value in data.items() if name != "cache_control"}
        # Unknown fields that are null or [] are dropped; others stay, and are refused.
        if data.keys() <= (known := cls.__pydantic_fields__.keys()):
            return data
        return {name: value for name, value in data.items() if name in known or value not in (None, [])}

    @field_validator("content")
    @classmethod
    def _check_null(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("role", "assistant") != "assistant":
            raise ValueError("should be a string or a list of parts")
        return value

    @model_validator(mode="after")
    def _check_media(self) -> Self:
        if media_of([self.content]):
            check_role(self.role)
        return self

    def given_fields(self) -> dict[str, Any]:
        """Return the fields that are not null."""
        fields = {name: value for name, value in self.__dict__.items() if value is not None}
        if self.tool_calls is not None:
            fields["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        return fields
