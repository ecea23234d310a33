"""The state of a schema that is being written for llguidance. `schema_lowering` writes schemas, `schema_objects` has
the keywords of objects, `schema_alternatives` the keywords whose schemas apply to the same value."""

from __future__ import annotations

from typing import Any

from octavo.structured_output.schema_keywords import Base, Document, Schema
from octavo.structured_output.schema_logic import Logic
from octavo.structured_output.schema_patterns import Pattern


class SchemaWriter:
    """The shared state of all keywords' writers: the definitions written so far, and facts about them."""

    def __init__(
        self, document: Document, closes: bool, is_picky: bool, is_coarse: bool, merges_references: bool
    ) -> None:
        self.unheld = set[str]()
        # By `id` of a list of alternatives: the list, and the name of the keyword that it was made from.
        self._origins: dict[int, tuple[list[Schema], str]] = {}
        self.definitions: dict[str, Schema] = {}
        self.num_nodes = 0
        self.has_patterns = self.has_merges = self.is_costly = False
        self.may_be_empty = False  # some part of the schema
        self.has_open_objects = False  # some object has named properties and allows others
        self._document = document
        self._draft = document.draft
        self._closes = closes
        self._is_picky = is_picky
        self._is_coarse = is_coarse
        self._merges_references = merges_references
        self._logic = Logic(document)
        self._names: dict[tuple[int, Base, bool], str] = {}
        self._waiting: list[tuple[str, Schema, Base, bool]] = []
        self._tried = set[tuple[tuple[tuple[str, Any], ...], ...]]()  # keywords for texts that llguidance has tried
        self._rewriting = 0
        self._num_rewritten = 0

    def _follows(self, pattern: Pattern) -> bool:
        raise NotImplementedError

    def write(self, schema: Schema, base: Base, *, is_alone: bool) -> Schema:
        """Return one schema for llguidance. `is_alone`: no other schema applies to the same value."""
        raise NotImplementedError
