"""The tools of the Responses API, and the functions that the model sees for them.

A chat template has no namespaces, in which clients declare the tools of an MCP server: the model sees such a tool under
both names. A search for tools that the client makes is a function, too. The tools that it finds, and those of
`additional_tools`, are in items of the conversation.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from octavo.entrypoints.http.body_fields import JsonObject, RequestBody, Text
from octavo.entrypoints.http.error_responses import validation_error
from octavo.entrypoints.openai.custom_tools import InputFormat

SEARCH = "tool_search"  # the search's type, and its name for the model
_QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
_OF_CHATS = {"name", "description", "parameters", "strict", "format"}
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Namespace(RequestBody):
    """The group of a tool: clients declare the tools of an MCP server in one."""

    name: ToolName
    description: Text | None = None


class ResponsesTool(RequestBody):
    """A function or a custom tool that the model may call, or a search for tools by the client."""

    type: Literal["function", "custom", "tool_search"]
    name: ToolName
    namespace: Namespace | None = None
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    output_schema: JsonObject | None = None
    format: InputFormat | None = None
    execution: Literal["client"] | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        others = ("parameters", "strict", "output_schema") if self.type == "custom" else ("format",)
        for name in (*others, *(("execution",) if self.type != SEARCH else ())):
            if getattr(self, name) is not None:
                raise ValueError(f"should have no {name} with type {self.type}")
        return self

    @property
    def name_for_model(self) -> str:
        return joined_name(self.name, None if self.namespace is None else self.namespace.name)

    def for_chat(self) -> dict[str, Any]:
        """Return the tool of chat completions that the model sees. The description of a namespace comes before those of
        its tools, and the schema of their outputs behind, as templates write descriptions."""
        fields = self.model_dump(include=_OF_CHATS, exclude_none=True) | {"name": self.name_for_model}
        idle = None
        if self.type == SEARCH:
            idle, fields = "Search for further tools.", {"parameters": _QUERY} | fields
        of_group = None if self.namespace is None else self.namespace.description
        output = None
        if self.output_schema is not None:
            output = f"Its output is JSON of this schema: {json.dumps(self.output_schema, ensure_ascii=False)}"
        if said := "\n".join(filter(None, (of_group, self.description or idle, output))):
            fields["description"] = said
        kind = "custom" if self.type == "custom" else "function"
        return {"type": kind, kind: fields}

    def shown(self) -> dict[str, Any]:
        """Return the tool with the fields that a client expects, without its namespace."""
        fields = self.model_dump(exclude_none=True, exclude={"namespace", *(("name",) if self.type == SEARCH else ())})
        if self.type == "custom":
            return {**fields, "format": {"type": "text"} if self.format is None else self.format.flat()}
        return fields if self.type == SEARCH else {"strict": False, **fields}


def joined_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model sees a tool. Codex' namespaces end with "__"."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def _check_tools(value: Any, info: ValidationInfo) -> Any:
    """Return a list of functions, custom tools and searches, without the objects of namespaces around them. Tools that
    run at OpenAI are left out if the server overlooks unknown fields; else they raise an error."""
    if not isinstance(value, list):
        return value
    tools = []
    for tool in value:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace":
            if not isinstance(inner := tool.get("tools"), list) or not inner:
                raise ValueError("has a namespace without tools")
            group = {name: one for name, one in tool.items() if name not in ("type", "tools")}
            tools += [{**one, "namespace": group} if isinstance(one, dict) else one for one in inner]
        elif kind == SEARCH and tool.get("execution") == "client":
            tools.append({**tool, "name": SEARCH})
        elif not isinstance(kind, str) or kind in ("function", "custom"):
            tools.append(_flat_tool(tool))
        elif info.context is None:
            said = (
                "has a tool of type {kind}, which is not built; functions, custom tools, namespaces of them and a "
                'tool_search with "execution": "client" are. A server with --unknown-fields warn leaves it out'
            )
            raise PydanticCustomError("extra_forbidden", said, {"kind": f"{kind!r:.60}"})
    return tools


def _flat_tool(tool: Any) -> Any:
    """Return a tool in the form of chat completions, which many clients send, in the form of Responses."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom") or not isinstance(tool.get(kind), dict):
        return tool
    is_of_chat = all(name in ("type", kind) or value is None for name, value in tool.items())
    return {**tool[kind], "type": kind} if is_of_chat else tool


Tools = Annotated[list[ResponsesTool], BeforeValidator(_check_tools)]
_TOOLS = TypeAdapter[list[ResponsesTool]](Tools)


def read_loaded_tools(value: Any, where: str) -> list[dict[str, Any]]:
    """Return the tools of an item, which may have been deferred before. Raises `RequestError`."""
    try:
        return shown_tools(_TOOLS.validate_python(_without_deferral(value), extra="ignore"))
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise validation_error([{**one, "loc": (where, *one["loc"])} for one in found]) from None


def _without_deferral(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_deferral(one) for one in value]
    if not isinstance(value, dict):
        return value
    fields = {name: one for name, one in value.items() if name != "defer_loading"}
    return fields | {"tools": _without_deferral(fields["tools"])} if "tools" in fields else fields


def shown_tools(tools: Sequence[ResponsesTool]) -> list[dict[str, Any]]:
    """Return tools as requests have them, in their namespaces."""
    shown = list[dict[str, Any]]()
    for namespace, group in groupby(tools, lambda tool: tool.namespace):
        inner = [tool.shown() for tool in group]
        if namespace is not None:
            inner = [{"type": "namespace", **namespace.model_dump(exclude_none=True), "tools": inner}]
        shown += inner
    return shown


def callable_tools(
    tools: Sequence[ResponsesTool] | None, items: Iterable[Mapping[str, Any]] = ()
) -> list[ResponsesTool]:
    """Return the tools of a request, and those that the conversation's `items` add to them."""
    found = list(tools or ())
    names = {one.name_for_model for one in found}
    for item in items:
        for one in _TOOLS.validate_python(item["tools"]) if "tools" in item else ():
            if one.name_for_model not in names:  # found again
                names.add(one.name_for_model)
                found.append(one)
    return found
