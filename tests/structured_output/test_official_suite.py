"""JSON Schema's official tests: no invalid value is taken, and valid ones only in other spellings are refused."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.structured_output.grammar_builder import WantedGrammar, make_checked_grammar
from tests.structured_output.corpus import admits


def remotes_in(folder: Path, draft: str) -> dict[str, Any]:
    """Return the suite's other documents by their paths, each with its URI, as definitions of a schema that refers to
    them. A document that names another URI than its own cannot be one."""
    found, name = {}, "id" if draft == "draft4" else "$id"
    for file in sorted(folder.glob("**/*.json")):
        path, schema = file.relative_to(folder).as_posix(), json.loads(file.read_text(encoding="utf-8"))
        url, is_of_another = f"http://localhost:1234/{path}", path.startswith(("draft", "v1/")) > path.startswith(draft)
        if isinstance(schema, dict) and not is_of_another and schema.get(name, url) == url:
            found[path] = {name: url, **schema}
    return found


def in_some_order(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in islice(permutations(value), 24):
            for parts in islice(product(*[list(islice(in_some_order(value[name]), 6)) for name in names]), 24):
                yield dict(zip(names, parts, strict=True))
    elif isinstance(value, list):
        for parts in islice(product(*[list(islice(in_some_order(one), 4)) for one in value]), 16):
            yield list(parts)
    else:
        yield value


_DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
# Files of vocabularies, and of optional parts that are not built.
_NOT_APPLICABLE = {
    "vocabulary.json", "optional/content.json", "optional/cross-draft.json",
    "optional/dependencies-compatibility.json", "optional/float-overflow.json",
}  # fmt: skip
_REFUSED = ("is not within the schema", "no value satisfies it", "without end")
# In descriptions of valid values that are refused: integers with a point; formats, which are held; quoted names in
# addresses; leap seconds at other offsets.
_OTHER_SPELLINGS = (
    "float", "0.0", "1.0", "only an annotation", "quoted string", "address-literal", "a leap second, with minus offset",
    "valid leap second, positive", "valid leap second, negative", "valid leap second, large",
)  # fmt: skip


@pytest.mark.skipif(
    "JSON_SCHEMA_TEST_SUITE" not in os.environ, reason="JSON_SCHEMA_TEST_SUITE is not json/tests of jsonschema's sdist"
)
@pytest.mark.parametrize("draft", _DRAFTS)
def test_the_official_suite(draft: str) -> None:
    """JSON Schema's own tests, from the folder `tests` of a checkout, or of the sdist of `jsonschema` (`json/tests`).
    Held or checked at the end, every invalid value is found, and no valid one is refused but for another spelling."""
    num, wrong = Counter[str](), list[Any]()
    folder = Path(os.environ["JSON_SCHEMA_TEST_SUITE"]) / draft
    remotes = remotes_in(folder.parents[1] / "remotes", draft)
    names = {file.relative_to(folder).as_posix(): file for file in folder.glob("**/*.json")}
    for name, file in sorted(names.items()):
        for case in json.loads(file.read_text(encoding="utf-8")) if name not in _NOT_APPLICABLE else ():
            schema = case["schema"]
            schema = {"$schema": _DRAFTS[draft], **schema} if isinstance(schema, dict) else {"allOf": [schema]}
            if "localhost" in json.dumps(case):
                schema = {**schema, "definitions": {**remotes, **schema.get("definitions", {})}}
            num["schemas"] += 1
            try:
                made = make_checked_grammar(WantedGrammar(StructuredOutputsParams(json=schema)))
            except RequestError as e:
                has_valid = any(test["valid"] for test in case["tests"])
                num["refused"] += has_valid
                if has_valid and not any(text in str(e) for text in _REFUSED):
                    wrong.append((name, case["description"], str(e)))
                continue
            for test in case["tests"]:
                num["values"] += 1
                is_taken = any(admits(made.text, one) for one in islice(in_some_order(test["data"]), 100))
                if made.check is not None:
                    is_taken = is_taken and made.check.problem(json.dumps(test["data"])) is None
                if is_taken != test["valid"]:
                    is_spelling = test["valid"] and any(text in test["description"] for text in _OTHER_SPELLINGS)
                    num["in other spellings"] += is_spelling
                    if not is_spelling:
                        wrong.append((name, case["description"], test["description"]))
    print(dict(num))
    assert wrong == []
    assert num["values"] > 500
