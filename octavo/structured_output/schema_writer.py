"""The state of a schema that is being written for llguidance. `schema_lowering` writes it, `schema_objects` has the
keywords of objects, `schema_alternatives` those that hold other schemas for the same value."""

from __future__ import annotations

from typing import Any

from octavo.structured_output.schema_keywords import Document, Schema, SchemaError
from octavo.structured_output.schema_logic import Logic
from octavo.structured_output.schema_patterns import Pattern


class SchemaWriter:
    """What all keywords' writers share: what has been written so far, and what was found of it."""

    def __init__(
        self, document: Document, closes: bool, is_picky: bool, is_coarse: bool, merges_references: bool
    ) -> None:
        self.unheld = set[str]()
        self._origins: dict[int, tuple[list[Schema], str]] = {}  # keywords that alternatives were made from
        self.definitions: dict[str, Schema] = {}
        self.num_nodes = 0
        self.has_patterns = self.has_merges = self.is_costly = False
        self.may_be_empty = False  # some part of it
        self.has_open_objects = False  # with properties of a schema of their own, and any others
        self._document = document
        self._draft = document.draft
        self._closes = closes
        self._is_picky = is_picky
        self._is_coarse = is_coarse
        self._merges_references = merges_references
        self._logic = Logic(document)
        self._names: dict[tuple[int, str, bool], str] = {}
        self._waiting: list[tuple[str, Schema, str, bool]] = []
        self._tried = set[tuple[tuple[str, Any], ...]]()  # keywords of texts that llguidance has tried
        self._rewriting = 0
        self._num_rewritten = 0

    def check_references(self) -> None:
        """Raise `SchemaError` where it depends on the way to a reference what it leads to."""
        if len(self._logic.dynamic_anchors) > 1 and self._logic.has_dynamic_references:
            raise SchemaError("$dynamicRef or $recursiveRef among several dynamic anchors is not built: write $ref")

    def _follows(self, pattern: Pattern) -> bool:
        raise NotImplementedError

    def write(self, schema: Schema, base: str, *, is_alone: bool) -> Schema:
        """One schema. `is_alone`: nothing else applies to the same value."""
        raise NotImplementedError
