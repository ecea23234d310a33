"""Published JSON schemas as grammars: `python benchmarks/schemas.py FOLDER_OR_FILE... [--each 150] [--seed 1]`.

Takes up to --each schemas of every folder, with what they refer to in files beside them. Printed are how many are
refused, and why; how many texts that `jsonschema` calls invalid are taken, by the grammar and the final check, and how
many valid ones are refused; and what a new schema costs in processor time: to write its grammar, to try it, and to
compile it for the default model's vocabulary. Texts are answers at random, and what differs from them in one place.
A file of MaskBench's (`schema` and `tests`: guidance-ai/jsonschemabench, `maskbench/data`) has values of its own, and
says which are valid.

Packages with schemas: `kubernetes-validate`, `check-jsonschema` (both are installed with the tests) and `cfn-lint`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator, FormatChecker
from jsonschema.validators import validator_for
from llguidance import LLMatcher

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from octavo.errors import RequestError
from octavo.loading.default_model import fetch_default_model
from octavo.loading.tokenizer import read_tokenizer
from octavo.sampling_params import StructuredOutputsParams
from octavo.structured_output.grammar_builder import MadeGrammar, WantedGrammar, make_checked_grammar
from octavo.structured_output.token_bytes import make_vocabulary
from octavo.structured_output.trial import _try
from tests.structured_output.corpus import BYTES, admits, random_answer, variants

NUM_ANSWERS, NUM_VARIANTS, PATIENCE_S = 2, 10, 5.0
# Parts of a value that are tried in its orders: a valid one has one that is taken, an invalid one is seldom missed in
# the schema's order, which comes first.
MAX_TEXTS = {True: 20_000, False: 1_000}
FORMATS = FormatChecker(["date", "uuid"])
DATE_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.IGNORECASE)


def bundled(path: Path) -> dict[str, Any] | None:
    """Return a file's schema with what it refers to in files beside it; None if it is no schema, or if that is
    elsewhere."""
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    if not isinstance(schema, dict) or not schema.keys() & {"properties", "type", "$ref", "anyOf", "oneOf", "allOf"}:
        return None
    files, found = dict[str, Any](), dict[str, Any]()

    def visit(value: Any, own: str) -> Any:
        if isinstance(value, list):
            return [visit(one, own) for one in value]
        if not isinstance(value, dict):
            return value
        ref = value.get("$ref")
        if not isinstance(ref, str) or (not own and ref.startswith("#")):
            return {key: visit(one, own) for key, one in value.items()}
        name, _, pointer = ref.partition("#")
        name = name or own
        if name not in files:
            files[name] = json.loads((path.parent / name).read_text(encoding="utf-8"))
        key = f"{name}{pointer}".replace("/", ".")
        if key not in found:
            found[key] = None
            target = files[name]
            for part in pointer.split("/")[1:]:
                target = target[part.replace("~1", "/").replace("~0", "~")]
            found[key] = visit(target, name)
        return {"$ref": f"#/definitions/{key}"}

    try:
        made = visit(schema, "")
    except (OSError, KeyError, ValueError, TypeError):
        return None
    return {**made, "definitions": {**made.get("definitions", {}), **found}} if found else made  # type: ignore[no-any-return]


@FORMATS.checks("date-time")
def is_date_time(value: object) -> bool:
    return not isinstance(value, str) or DATE_TIME.fullmatch(value) is not None


def stated(path: Path) -> tuple[dict[str, Any], list[tuple[Any, bool]]] | None:
    """Return the schema of a file of MaskBench's, with its values and whether each is valid; None for other files."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("tests"), list) or "schema" not in found:
        return None
    return found["schema"], [(test["data"], test["valid"]) for test in found["tests"]]


def property_orders(schema: Any) -> Iterator[dict[str, int]]:
    """The place of each property in every object of a schema."""
    if isinstance(schema, dict):
        if isinstance(properties := schema.get("properties"), dict):
            yield {key: place for place, key in enumerate(properties)}
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from property_orders(part)


class Reader:
    """Reads values as a grammar allows them: properties in any order, since a model writes them in the grammar's."""

    def __init__(self, grammar: str) -> None:
        self._matcher = LLMatcher(BYTES, grammar, log_level=0)
        self._num_texts = 0  # that may still be tried
        self._orders = list(property_orders(json.loads(grammar))) if grammar.startswith("{") else []

    def takes(self, value: Any, max_texts: int) -> bool:
        self._num_texts = max_texts
        return any(self._matcher.is_accepting() for _ in self._value(value))

    def _text(self, text: str) -> Iterator[None]:
        """Yield once if the grammar allows a text, and take it back."""
        self._num_texts -= 1
        data = list(text.encode())
        num = self._matcher.try_consume_tokens(data) if self._num_texts >= 0 else 0
        if num == len(data):
            yield
        self._matcher.rollback(num)

    def _value(self, value: Any) -> Iterator[None]:
        if isinstance(value, dict):
            for _ in self._text("{"):
                yield from self._properties({key: value[key] for key in self._order(value)}, "")
        elif isinstance(value, list):
            for _ in self._text("["):
                yield from self._items(value, 0)
        else:
            yield from self._text(json.dumps(value, ensure_ascii=False))

    def _order(self, keys: Iterable[str]) -> list[str]:
        """Keys in the order of the schema's object that has most of them."""
        order = max(self._orders, key=lambda order: sum(key in order for key in keys), default={})
        return sorted(keys, key=lambda key: order.get(key, len(order)))

    def _properties(self, left: dict[str, Any], separator: str) -> Iterator[None]:
        if not left:
            yield from self._text("}")
        # Properties that may come next: first those behind which the others of them may still come.
        able = [key for key in left if self._may_come(separator, key)]
        for is_first in (True, False):
            for key in able:
                for _ in self._text(f"{separator}{json.dumps(key, ensure_ascii=False)}: "):
                    for _ in self._value(left[key]):
                        if is_first == all(self._may_come(", ", other) for other in able if other != key):
                            yield from self._properties({name: left[name] for name in left if name != key}, ", ")

    def _may_come(self, separator: str, key: str) -> bool:
        data = list(f"{separator}{json.dumps(key, ensure_ascii=False)}: ".encode())
        num = self._matcher.try_consume_tokens(data)
        self._matcher.rollback(num)
        return num == len(data)

    def _items(self, items: list[Any], index: int) -> Iterator[None]:
        if index == len(items):
            yield from self._text("]")
            return
        for _ in self._text(", " if index else ""):
            for _ in self._value(items[index]):
                yield from self._items(items, index + 1)


def texts(made: MadeGrammar, rng: random.Random) -> Iterator[Any]:
    for _ in range(NUM_ANSWERS):
        answer = random_answer(made.text, rng)
        if answer is not None:
            value = json.loads(answer)
            yield from [value, *islice(variants(value, rng), NUM_VARIANTS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--each", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tokenizer = read_tokenizer(str(fetch_default_model()))
    vocabulary = make_vocabulary(tokenizer.backend_tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    rng = random.Random(args.seed)
    total = Counter[str]()
    written, tried, compiled = list[float](), list[float](), list[float]()
    for folder in args.paths:
        paths = sorted(folder.glob("**/*.json")) if folder.is_dir() else [folder]
        counts = Counter[str]()
        for path in rng.sample(paths, len(paths)):
            if counts["schemas"] >= args.each:
                break
            of_file = stated(path)
            schema = of_file[0] if of_file else bundled(path)
            if schema is None:
                continue
            counts["schemas"] += 1
            begin = time.process_time()
            try:
                made = make_checked_grammar(WantedGrammar(StructuredOutputsParams(json=schema)))
            except RequestError as error:
                counts["refused"] += 1
                print(f"refused: {path}: {error}", flush=True)
                continue
            written.append(time.process_time() - begin)
            begin = time.thread_time()
            _try(made.text)  # it was done in a process of its own, too
            tried.append(time.thread_time() - begin)
            begin = time.thread_time()
            LLMatcher(vocabulary, made.text, log_level=0)
            compiled.append(time.thread_time() - begin)
            oracle = validator_for(schema, default=Draft7Validator)(schema, format_checker=FORMATS)
            deadline = time.process_time() + PATIENCE_S
            verdicts = {json.dumps(value): is_valid for value, is_valid in of_file[1]} if of_file else {}
            for value in map(json.loads, verdicts) if of_file else texts(made, rng):
                if time.process_time() > deadline:
                    counts["given up"] += 1
                    break
                text = json.dumps(value)
                try:
                    is_valid = verdicts[text] if of_file else oracle.is_valid(value)
                except Exception:  # a pattern that is none of Python's
                    continue
                is_taken = any(admits(made.text, one) for one in (value, json.loads(json.dumps(value, sort_keys=True))))
                if of_file and not is_taken:
                    is_taken = Reader(made.text).takes(value, MAX_TEXTS[is_valid])
                is_taken = is_taken and (made.check is None or made.check.problem(text) is None)
                counts["texts"] += 1
                if is_taken != is_valid:
                    kind = "invalid ones taken" if is_taken else "valid ones refused"
                    counts[kind] += 1
                    why = next(iter(oracle.iter_errors(value)), None)
                    reason = "" if why is None else why.message[:200]
                    print(f"{kind}: {path.name}: {text[:200]} {reason}", flush=True)
        print(f"{folder}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
        total += counts
    print("together: " + ", ".join(f"{count} {what}" for what, count in total.items()))
    for name, times in (("written", written), ("tried", tried), ("compiled", compiled)):
        if times:
            p90 = sorted(times)[int(len(times) * 0.9)]
            print(f"a new schema {name}: median {statistics.median(times) * 1e3:.2f} ms, p90 {p90 * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
