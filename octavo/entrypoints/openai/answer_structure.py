"""The fields of a request that say what structure its answer has, with OpenAI's names and vLLM's."""

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from octavo.entrypoints.http.body_fields import RequestBody, Text
from octavo.errors import RequestError


class StructuredOutputs(RequestBody):
    """The structure of an answer: one of `json`, `regex`, `choice`, `grammar`, `json_object` and `structural_tag`, with
    vLLM's options. Options alone apply to the structure of another field."""

    model_config = ConfigDict(serialize_by_alias=True)

    json_: Text | dict[str, Any] | None = Field(None, alias="json")
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Text | dict[str, Any] | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: Text | None = None
    final_check: Literal["report", "error", "refuse"] | None = None


class JsonSchemaFormat(RequestBody):
    """OpenAI's wrapping of a schema. The schema always holds; `strict` also closes objects that do not give
    `additionalProperties`."""

    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


# For each other field of a `ResponseFormat`: the only `type` that it may come with.
_TYPE_OF_FIELD = {
    "json_schema": "json_schema", "schema_": "json_object", "format": "structural_tag", "structures": "structural_tag",
    "triggers": "structural_tag",
}  # fmt: skip


class ResponseFormat(RequestBody):
    """OpenAI's way to ask for JSON, and vLLM's for structural tags: xgrammar's, or the older list with its triggers."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # of json_object, as llama.cpp and others take it
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[Text] | None = None

    @property
    def structural_tag(self) -> dict[str, Any] | None:
        """Return the structural tag in the form of `structured_outputs`, or None."""
        return self.model_dump(exclude_none=True) if self.type == "structural_tag" else None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise RequestError(
                'response_format of type json_schema needs "json_schema": {"name": ..., "schema": {...}}.',
                param="response_format.json_schema",
            )
        fields = [name for name in _TYPE_OF_FIELD if getattr(self, name) is not None]
        for name in fields:
            if self.type != (kind := _TYPE_OF_FIELD[name]):
                field = f"response_format.{name.rstrip('_')}"
                raise RequestError(f"{field} goes with type {kind}, and only with it.", param=field)
        if self.type == "structural_tag" and fields not in (["format"], ["structures", "triggers"]):
            raise RequestError(
                "response_format of type structural_tag needs either format or structures and triggers.",
                param="response_format",
            )
        return self
