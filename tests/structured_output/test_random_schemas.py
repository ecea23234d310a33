"""Random schemas whose keywords meet in every pair, and values near to what they admit, judged by `jsonschema`.

A value that `jsonschema` accepts must be accepted in some order of its properties, by the grammar and the final check;
one that it refuses must be refused. OCTAVO_SCHEMAS is the number of schemas, OCTAVO_SCHEMA_SEED the first seed.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from jsonschema import Draft7Validator, Draft202012Validator
from llguidance import LLMatcher

from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.structured_output.grammar_builder import MadeGrammar, WantedGrammar, make_checked_grammar
from tests.structured_output.corpus import BYTES, Schema, random_answer, variants

NUM_SCHEMAS, FIRST_SEED = int(os.environ.get("OCTAVO_SCHEMAS", "160")), int(os.environ.get("OCTAVO_SCHEMA_SEED", "0"))
NUM_VALUES = 40
_NAMES = ["a", "ab", "b", "x"]
_TEXTS = ["", "a", "ab", "abc", "b1", "é", "😀b", 'q"\\', "a\nb", "-"]
_NUMBERS = [0, 1, 2, 3, -1, -2, 10, 0.5, 2.5, -0.25, 1.75]
_PATTERNS = ["^a", "b$", "^[a-c]{1,2}$", "[0-9]", "^(a|x)$", "^a|b$", "^$", "^(?!a)", ".", '^[^"]*$']
_TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
_FIRST, _DRAFT_7 = "https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"


def _value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.random()
    if kind < 0.25 and depth:
        return {name: _value(rng, depth - 1) for name in rng.sample(_NAMES, rng.randint(0, 3))}
    if kind < 0.45 and depth:
        return [_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind < 0.65:
        return rng.choice(_TEXTS)
    return rng.choice(_NUMBERS) if kind < 0.9 else rng.choice([None, True, False])


def _names(rng: random.Random, most: int = 2) -> list[str]:
    return rng.sample(_NAMES, rng.randint(1, most))


class Schemas:
    """Schemas of one document, which may refer to its definitions."""

    def __init__(self, rng: random.Random, draft: str) -> None:
        self._rng = rng
        self._is_new = draft == _FIRST
        choose = rng.choice
        self.keywords: dict[str, Callable[[int], Any]] = {
            "type": lambda depth: choose([choose(_TYPES), rng.sample(_TYPES, 2)]),
            "enum": lambda depth: [_value(rng, 1) for _ in range(rng.randint(1, 3))],
            "const": lambda depth: _value(rng, 1),
            "minimum": lambda depth: choose(_NUMBERS),
            "maximum": lambda depth: choose(_NUMBERS),
            "exclusiveMinimum": lambda depth: choose(_NUMBERS),
            "exclusiveMaximum": lambda depth: choose(_NUMBERS),
            "multipleOf": lambda depth: choose([1, 2, 3, 0.5, 0.25, 1.5]),
            "minLength": lambda depth: rng.randrange(4),
            "maxLength": lambda depth: rng.randrange(4),
            "pattern": lambda depth: choose(_PATTERNS),
            "minItems": lambda depth: rng.randrange(4),
            "maxItems": lambda depth: rng.randrange(4),
            "uniqueItems": lambda depth: True,
            "contains": self.schema,
            "properties": lambda depth: {
                name: choose([self.schema(depth), self.schema(depth), {"$ref": "#"}]) for name in _names(rng, 3)
            },
            "required": lambda depth: _names(rng),
            "additionalProperties": self.schema,
            "patternProperties": lambda depth: {
                one: self.schema(depth) for one in rng.sample(_PATTERNS, choose([1, 2]))
            },
            "propertyNames": lambda depth: choose([self.schema(depth), {"pattern": choose(_PATTERNS)}]),
            "minProperties": lambda depth: rng.randrange(4),
            "maxProperties": lambda depth: rng.randrange(4),
            "allOf": lambda depth: [self.schema(depth) for _ in range(rng.randint(1, 2))],
            "anyOf": lambda depth: [self.schema(depth) for _ in range(rng.randint(1, 3))],
            "oneOf": lambda depth: [self.schema(depth) for _ in range(rng.randint(1, 3))],
            "not": self.schema,
            "if": self.schema,
            "then": self.schema,
            "else": self.schema,
            "$ref": lambda depth: choose(["#/$defs/p", "#/$defs/q~0~1%25"]),
        }
        if self._is_new:
            self.keywords |= {
                "items": self.schema,
                "prefixItems": lambda depth: [self.schema(depth) for _ in range(rng.randint(1, 2))],
                "minContains": lambda depth: rng.randrange(4),
                "maxContains": lambda depth: rng.randrange(4),
                "unevaluatedItems": self.schema,
                "unevaluatedProperties": self.schema,
                "dependentRequired": lambda depth: {choose(_NAMES): _names(rng)},
                "dependentSchemas": lambda depth: {choose(_NAMES): self.schema(depth)},
            }
        else:
            self.keywords |= {
                "items": lambda depth: choose(
                    [{"allOf": [self.schema(depth)]}, [self.schema(depth), self.schema(depth)]]
                ),
                "additionalItems": self.schema,
                "dependencies": lambda depth: {choose(_NAMES): choose([_names(rng), self.schema(depth)])},
            }

    def schema(self, depth: int = 2, keywords: tuple[str, ...] = ()) -> Any:
        """A schema with these keywords, and with others at random."""
        rng = self._rng
        if not keywords and rng.random() < 0.12:
            return rng.choice([True, False, {}])
        if not depth:
            plain = [{"type": rng.choice(_TYPES)}, {"const": _value(rng, 0)}, {"minimum": 1}, {"maxLength": 2}]
            return rng.choice(plain)
        num = rng.choice([1, 1, 2, 3]) if not keywords else rng.choice([0, 0, 1])
        chosen = [*keywords, *rng.sample(list(self.keywords), num)]
        if rng.random() < 0.5:
            chosen.insert(0, "type")
        return {keyword: self.keywords[keyword](depth - 1) for keyword in chosen}


def random_document(seed: int) -> Schema:
    """A schema of draft 2020-12 or 7 with a pair of keywords, each of which comes in turn."""
    rng = random.Random(seed)
    draft = rng.choice([_FIRST, _FIRST, _DRAFT_7])
    schemas = Schemas(rng, draft)
    pairs = list(itertools.combinations(schemas.keywords, 2))
    # Neighbouring seeds have pairs that are far from each other.
    schema: Schema = schemas.schema(2, pairs[seed * 389 % len(pairs)])
    if draft != _FIRST and "$ref" in schema:  # where what stands beside it does not count
        schema = {"allOf": [schema]}
    del schemas.keywords["$ref"]  # in a definition it could lead back to where it stands
    definitions = {"p": schemas.schema(1), "q~/%": schemas.schema(1)}
    return {"$schema": draft, **schema, **({"$defs": definitions} if "#/$defs/" in json.dumps(schema) else {})}


class Taker:
    """Says whether a grammar and its final check take values, written in any order of their properties."""

    def __init__(self, made: MadeGrammar) -> None:
        self._matcher = LLMatcher(BYTES, made.text, log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()
        self._check = made.check

    def takes(self, value: Any) -> bool:
        if self._check is not None and self._check.problem(json.dumps(value)) is not None:
            return False
        return any(self._reads(text) for text in itertools.islice(_texts(value), 300))

    def _reads(self, text: str) -> bool:
        data = list(text.encode())
        num = self._matcher.try_consume_tokens(data)
        is_whole = num == len(data) and self._matcher.is_accepting()
        self._matcher.rollback(num)
        return is_whole


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            parts = [[f"{json.dumps(name)}: {text}" for text in _some_texts(value[name])] for name in names]
            yield from ("{" + ", ".join(one) + "}" for one in itertools.product(*parts))
    elif isinstance(value, list):
        yield from ("[" + ", ".join(one) + "]" for one in itertools.product(*map(_some_texts, value)))
    else:
        yield json.dumps(value, ensure_ascii=False)


def _some_texts(value: Any) -> list[str]:
    return list(itertools.islice(_texts(value), 6))


def problems_of(schema: Schema, rng: random.Random) -> list[tuple[str, Any]]:
    """What is wrong with the values that Octavo takes: (what, value)."""
    oracle = (Draft7Validator if schema.get("$schema") == _DRAFT_7 else Draft202012Validator)(schema)
    values = [_value(rng) for _ in range(NUM_VALUES)]
    found = list[tuple[str, Any]]()
    with suppress(RecursionError):  # a reference that leads back to itself
        valid = [value for value in values if oracle.is_valid(value)]
        try:
            made = make_checked_grammar(WantedGrammar(StructuredOutputsParams(json=schema)))
        except RequestError as error:
            return [(f"refused: {error}", valid[0])] if valid else []
        taker, answer = Taker(made), random_answer(made.text, rng, 200)
        if answer is not None and "Infinity" not in json.dumps(value := json.loads(answer)):
            values += itertools.islice(variants(value, rng), 10)
            if not oracle.is_valid(value) and (made.check is None or made.check.problem(answer) is None):
                found.append(("accepted, and is invalid", answer))
        for value in values:
            if taker.takes(value) != (is_valid := oracle.is_valid(value)):
                found.append(("refused, and is valid" if is_valid else "accepted, and is invalid", value))
    return found


def test_pairs_of_keywords_admit_what_is_valid_and_nothing_else() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_SCHEMAS):
        schema = random_document(seed)
        assert problems_of(schema, random.Random(seed)) == [], (seed, schema)
