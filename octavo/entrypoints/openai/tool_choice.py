"""The field `tool_choice` of chat completions and Responses: its forms, and how they are read and shown.

Chat completions nest (`{"type": "function", "function": {"name": ...}}`), Responses do not (`{"type": "function",
"name": ...}`). Clients send either form to either API, so both APIs read both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo
from typing_extensions import TypedDict

from octavo.entrypoints.http.body_fields import RequestBody, Text


class FunctionName(RequestBody):
    name: Text


class NamedToolChoice(RequestBody):
    """The function or custom tool that must be called. A custom tool is named as a function, as the model sees it."""

    type: Literal["function", "custom"]
    function: FunctionName


class AllowedFunctions(RequestBody):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1)]


class AllowedToolsChoice(RequestBody):
    """Some of the tools, as if there were no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


_CHOICES = (
    'should be "auto", "none", "required", {"type": "function", "function": {"name": ...}}, '
    '{"type": "custom", "custom": {"name": ...}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
)


def _read(value: Any, info: ValidationInfo) -> Any:
    """Return the choice of either form. Raises `ValueError`."""
    extra = info.context and info.context["extra"]
    if value is None or value in ("auto", "none", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    try:
        if kind in ("function", "custom"):
            return NamedToolChoice.model_validate(_named(value), extra=extra)
        if kind == "allowed_tools":
            nested = _nested(value, "allowed_tools")
            allowed = nested["allowed_tools"]
            if isinstance(allowed, dict) and isinstance(tools := allowed.get("tools"), list):
                nested["allowed_tools"] = {**allowed, "tools": [_named(tool) for tool in tools]}
            return AllowedToolsChoice.model_validate(nested, extra=extra)
    except ValidationError as error:
        if all(one["type"] == "extra_forbidden" for one in error.errors(include_url=False)):
            raise  # unknown fields are reported, or ignored by --unknown-fields
    raise ValueError(_CHOICES)


def _named(value: Any) -> Any:
    """Return the object that names a tool with the name in its field `function`."""
    if isinstance(value, dict) and value.get("type") == "custom" and "custom" in value:
        if "function" in value:
            raise ValueError(_CHOICES)
        return {"function" if key == "custom" else key: one for key, one in value.items()}
    return _nested(value, "function")


def _nested(value: Any, name: str) -> Any:
    """Return the object with all fields except `type` moved into its field `name`."""
    if not isinstance(value, dict) or name in value:
        return dict(value) if isinstance(value, dict) else value
    rest = {key: one for key, one in value.items() if key != "type"}
    return {"type": value.get("type"), name: rest}


def flat(choice: ToolChoice) -> Any:
    """Return a choice in the form of Responses, "auto" if there is none."""
    if isinstance(choice, NamedToolChoice):
        return {"type": choice.type, "name": choice.function.name}
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        return {"type": "allowed_tools", "mode": allowed.mode, "tools": [flat(tool) for tool in allowed.tools]}
    return choice or "auto"


class FlatFunction(TypedDict):
    """The function or custom tool that must be called."""

    type: Literal["function", "custom"]
    name: str


class FlatAllowedTools(TypedDict):
    """Some of the tools, as if there were no others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FlatFunction]


_Word = Literal["none", "auto", "required"]
ToolChoice = Annotated[_Word | NamedToolChoice | AllowedToolsChoice | None, BeforeValidator(_read)]
# The same type, described by /openapi.json in the form of Responses.
FlatToolChoice = Annotated[
    _Word | NamedToolChoice | AllowedToolsChoice | None,
    BeforeValidator(_read, json_schema_input_type=_Word | FlatFunction | FlatAllowedTools | None),
]
