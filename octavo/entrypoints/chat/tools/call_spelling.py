"""Spells calls in a format. It serves the grammars of forced calls, the reader of forced calls, and conversations whose
template writes no calls."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import unquote

from octavo.entrypoints.chat.tools.python_calls import is_python_name
from octavo.entrypoints.chat.tools.text_rules import WRITTEN, some_text_matches, text_rules
from octavo.entrypoints.chat.tools.tool_formats import JsonCalls, KeyedValues, NamedJson, PythonCalls, Tags, ToolFormat
from octavo.entrypoints.chat.tools.tool_parser_base import ToolSchemas
from octavo.structured_output.answer_parts import (
    CallText,
    KeyedChoice,
    KeyedList,
    KeyedObject,
    KeyedScalar,
    KeyedValue,
    ParameterList,
    ParameterText,
    Spelling,
    TextRule,
    ValueKind,
)
from octavo.structured_output.argument_grammars import describes_object
from octavo.structured_output.flat_objects import flat_objects
from octavo.structured_output.schema_keywords import SILENT

# Keywords that limit the texts of a schema; others are notes, or concern other types.
_OF_TEXTS = {"not", "if", "$ref", "$dynamicRef", "$recursiveRef", *WRITTEN}
_BESIDE_REFS = {"type", "allOf", "anyOf", "oneOf", *_OF_TEXTS} - {"$ref"}
_SCALARS = {"string", "number", "integer", "boolean", "null"}
_MAX_DEPTH = 8  # of nested references and choices
_MAX_KEYED = 2000  # values of all functions together: references can name one value in many places
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OF_KEYED = {
    "type", "anyOf", "items", "minItems", "maxItems", "properties", "required", "additionalProperties", "strict",
    *WRITTEN, *_OF_NUMBERS, *SILENT,
}  # fmt: skip
_MAX_ITEMS = 1000
# Without brackets outside of texts, as they would end a call.
_PYTHON_ARGUMENTS = r"""([^"'()]|"(\\[^\n]|[^"\\])*"|'(\\[^\n]|[^'\\])*')*"""


def list_of_calls(tools: ToolSchemas) -> Spelling:
    """Return the spelling `[{"name": "f", "parameters": {…}}, …]`, for models without a format that could spell the
    calls."""
    calls = {name: CallText(json.dumps({"name": name, "parameters": 0})[:-2], "}") for name in tools}
    return Spelling("[", "]", ", ", calls)


def arguments_only(name: str) -> Spelling:
    """Return the spelling of an answer that is only the arguments of one function."""
    return Spelling("", "", "", {name: CallText("", "")})


def spelling(
    form: ToolFormat, tools: ToolSchemas, num_earlier_calls: int = 0, free: Collection[str] = ()
) -> Spelling | None:
    """Return how `form` spells calls of `tools`, after `num_earlier_calls` in the conversation. None if the format is
    ambiguous for some values. Functions named in `free` get any arguments where these are not one JSON object."""
    body = form.body
    opened, separator, start, end = form.open, form.separator, form.start, form.end
    if form.text_start:
        separator, start = separator + start, ""
    closed = "" if form.is_whole_answer else form.close  # models write it after a skipped start
    if isinstance(body, JsonCalls):
        calls = {name: CallText(f"{{{_head_of_json(body, name)}: ", "}") for name in tools}
        if body.is_list:
            return Spelling(f"{opened}{start}[", f"]{end}{closed}", ", ", calls)
    elif isinstance(body, NamedJson):
        call_id = body.call_id.replace("\\d", str(num_earlier_calls))
        before = f"call{num_earlier_calls:06}{body.id_before}{body.before}" if body.id_before else body.before
        calls = {name: CallText(f"{before}{name}{call_id}{body.after}", body.end) for name in tools}
    elif isinstance(body, Tags):
        parameter = ParameterText(
            body.key_before, f"{body.key_after}{body.text_attribute}{body.value_before}",
            f"{body.key_after}{body.json_attribute}{body.value_before}", body.value_after,
        )  # fmt: skip
        number = body.index.replace("\\d", str(num_earlier_calls + 1))
        calls = {
            name: CallText(
                f"{body.name_before}{name}{number}{body.name_after}{body.json_before}", body.json_after + body.end
            )
            for name in tools
        }
        for name, schema in tools.items() if not body.json_before else ():
            if name in free:
                calls[name] = CallText(f"{body.name_before}{name}{body.name_after}", body.end, free="")
                continue
            mark = body.value_after.strip().partition("{key}")[0]
            flats, is_held = _alternatives(schema)
            lists = _parameter_lists(flats, schema, mark, says_types=parameter.says_types)
            kinds = [kind for one in lists or () for kind in one.kinds.values()]
            if lists is None or (
                body.has_cdata and any(isinstance(kind, TextRule) and kind.expressions for kind in kinds)
            ):
                return None
            head = f"{body.name_before}{name}{body.name_after}"
            calls[name] = CallText(head, body.end, parameter, lists, is_held=is_held)
    elif isinstance(body, PythonCalls):
        calls = {}
        for name, schema in tools.items():
            if name in free:
                calls[name] = CallText(f"{name}(", ")", free=_PYTHON_ARGUMENTS)
                continue
            flats, is_held = _alternatives(schema)
            lists = _parameter_lists(flats, schema, None)
            if lists is None or not all(is_python_name(key) for one in lists for key in one.kinds):
                return None
            calls[name] = CallText(f"{name}(", ")", ParameterText("", "=", "=", "", ", "), lists, is_held=is_held)
        if body.is_list:
            return Spelling(f"{opened}{start}[", f"]{end}", ", ", calls)
        return Spelling(f"{opened}{start}", f"{end}{closed}", "\n", calls)
    else:
        calls, notation = {}, _Keyed(body.sorts_keys, (body.quote, start, end))
        parameter = ParameterText("", f":{body.quote}", ":", body.quote, ",")
        for name, schema in tools.items():
            if name in free:
                calls[name] = CallText(f"{body.before}{name}{{", "", free="")
                continue
            flats, is_held = _alternatives(schema)
            keyed = _choice([notation.value(one, schema) for one in flats])
            if keyed is None:
                return None
            calls[name] = CallText(f"{body.before}{name}", "", parameter, keyed=keyed, is_held=is_held)
    wrapped = {
        name: replace(
            call, before=start + call.before, after=call.after + end, address=form.address.replace("{name}", name)
        )
        for name, call in calls.items()
    }
    is_json = isinstance(body, JsonCalls) and bool(body.name) and not (body.first or opened or start or end)
    keys = (body.name, body.arguments) if isinstance(body, JsonCalls) and is_json else None
    return Spelling(opened, closed, separator, wrapped, keys)


def written_calls(form: ToolFormat, calls: Sequence[tuple[str, Any]]) -> str:
    """Return the text of `calls`, names with arguments, in `form`."""
    spelled = None if isinstance(form.body, KeyedValues) else spelling(form, {name: {} for name, _ in calls})
    if spelled is None:
        body = form.body
        head = body.before if isinstance(body, KeyedValues) else ""
        quote = body.quote if isinstance(body, KeyedValues) else '"'
        texts = [f"{form.start}{head}{name}{_keyed(arguments, quote)}{form.end}" for name, arguments in calls]
        return f"{form.open}{form.separator.join(texts)}{form.close}"
    texts = []
    for i, (name, arguments) in enumerate(calls):
        call = spelled.calls[name]
        before = call.before
        if isinstance(form.body, NamedJson) and form.body.call_id:
            counted = form.body.call_id.replace("\\d", str(i))
            before = before.replace(form.body.call_id.replace("\\d", "0"), counted)
        texts.append(f"{before}{_written_arguments(call, arguments)}{call.after}")
    opened = form.start if form.text_start else spelled.open
    return f"{opened}{spelled.separator.join(texts)}{spelled.close}"


def _written_arguments(call: CallText, arguments: Any) -> str:
    if call.parameter is None or not isinstance(arguments, Mapping):
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    form, texts = call.parameter, []
    is_json = form.after_value == ""  # otherwise Python's notation, in which texts have quotes
    for key, value in arguments.items():
        is_text = isinstance(value, str) and not is_json
        after_key = form.after_key_of_text if is_text else form.after_key_of_json
        shown = value if is_text else json.dumps(value, ensure_ascii=False)
        texts.append(f"{form.before_key}{key}{after_key}{shown}{form.after_value.replace('{key}', key)}")
    return form.separator.join(texts)


def _keyed(value: Any, quote: str) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_keyed(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_keyed(item, quote) for item in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def _head_of_json(body: JsonCalls, name: str) -> str:
    if not body.name:
        return json.dumps(name, ensure_ascii=False)
    return f"{body.first}{_pair(body.name, name)}, {json.dumps(body.arguments)}"


def _pair(key: str, value: str) -> str:
    return f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"


def _parameter_lists(
    flats: Sequence[dict[str, Any]], schema: Mapping[str, Any], value_after: str | None, *, says_types: bool = False
) -> tuple[ParameterList, ...] | None:
    """Return the lists of parameters that a function takes, by the flat forms of its `schema`, in a format that writes
    texts without quotes (`value_after` ends them; None: texts have quotes). `says_types`: the format says of each value
    whether it is a text. Return None if such lists cannot express the whole schema."""
    found = []
    for flat in flats:
        properties = flat["properties"]
        is_told = value_after is None or says_types
        if not is_told and not all(
            _is_read_as(one, name, schema) for name, one in properties.items() if one is not False
        ):
            return None
        if (kinds := _kinds(flat, schema, value_after, says_types=says_types)) is None:
            return None
        schemas = {name: properties[name] for name, kind in kinds.items() if kind is None}
        found.append(ParameterList(kinds, flat["required"], schemas))
    return tuple(found) or None


def _alternatives(schema: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Return the flat schemas of a function's arguments that some arguments satisfy, without optional texts that
    nothing satisfies, and whether all that satisfy one of them are valid."""
    flats = flat_objects(schema) if describes_object(schema) else []
    is_held, found = flats is not None, []
    for flat in flat_objects(schema, is_checked=True) or () if flats is None else flats:
        properties = {name: one for name, one in flat["properties"].items() if _has_text(one, schema)}
        if all(name in properties or name not in flat["properties"] for name in flat["required"]):
            found.append({**flat, "properties": properties})
    return found, is_held


def _has_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Return whether a schema takes other values than texts, or some text matches all that it says. The expressions of
    formats leave rare texts out, so that nothing follows from them."""
    if schema_types(schema, root) != {"string"} or "format" in schema:
        return True
    return (rules := _rules(schema, root)) is None or some_text_matches(rules)


def _is_read_as(schema: Any, name: str, root: Mapping[str, Any]) -> bool:
    """Return whether the reader of calls, which does not know the alternative of `root` that a call follows, takes the
    parameter `name` for the types that `schema` gives it there."""
    kinds, read = schema_types(schema, root), schema_types(property_schema(root, name, root), root)
    return "string" not in kinds | read or kinds - {"unknown"} == read - {"unknown"}


def _kinds(
    schema: Mapping[str, Any], root: Mapping[str, Any], value_after: str | None, *, says_types: bool
) -> dict[str, ValueKind] | None:
    """Return the form of each parameter of a flat schema: a rule for texts, the texts of an enumeration, or None for
    JSON. Return None if these forms cannot express the whole schema."""
    properties, required = schema["properties"], schema["required"]
    is_empty = all(one is False for one in properties.values())
    if schema.get("additionalProperties") and is_empty:  # others than those that are named are left out
        return None
    if set(required) - properties.keys():
        return None
    found: dict[str, ValueKind] = {}
    for name, one in properties.items():
        if one is False and name not in required:
            continue
        if not isinstance(one, Mapping) or not set(name).isdisjoint('<>"\n') or name != name.strip() or not name:
            return None
        if one.get("enum") == [] and name not in required:  # no value is valid: the parameter is left out
            continue
        if value_after is None:
            found[name] = None
            continue
        for _ in range(_MAX_DEPTH):
            target = _referred(one, root)
            if target is None:
                break
            if one.keys() & _BESIDE_REFS:
                return None
            one = target
        kinds = schema_types(one, root)
        if not says_types and _takes_any_text(one, kinds):
            found[name] = TextRule()
            continue
        if {"string"} < kinds <= {"string", "null", "array", "object"} and kinds & {"array", "object"}:
            if (rule := _text_or_json(one, root, kinds, says_types=says_types)) is None:
                return None
            found[name] = rule
            continue
        if not kinds or ("string" in kinds and not kinds <= {"string", "null"}) or "unknown" in kinds:
            return None  # a text would look like JSON
        if "string" not in kinds:
            found[name] = None
        elif (texts := _enumerated(one)) is not None:
            if any(value_after in text or text != text.strip("\n") for text in texts):
                return None
            if "null" in kinds and not says_types and any(text.strip() in ("null", "None") for text in texts):
                return None  # the text would look like null
            found[name] = texts
        elif (rules := _rules(one, root)) is None or not some_text_matches(rules):
            return None
        else:
            found[name] = TextRule(rules, "null" in kinds)
    return found


def _text_or_json(
    schema: Mapping[str, Any], root: Mapping[str, Any], kinds: set[str], *, says_types: bool
) -> TextRule | None:
    """Return the form of a text in whose place a list or an object may stand. Where the format does not say which it
    is, no text begins like one, nor like a text in quotes if it must follow a rule."""
    if schema.keys() <= {"anyOf", *SILENT}:
        parts = {id(one): schema_types(one, root) for one in schema["anyOf"]}
        texts = [one for one in schema["anyOf"] if parts[id(one)] == {"string"}]
        others = [one for one in schema["anyOf"] if "string" not in parts[id(one)]]
        of_json: dict[str, Any] = {"anyOf": others}
        if len(texts) != 1 or len(others) + 1 < len(schema["anyOf"]):
            return None
        rules = _rules(texts[0], root)
    elif schema.keys() & (_BESIDE_REFS - {"type", *WRITTEN} | {"enum", "const"}):
        return None
    else:
        rules = text_rules({key: schema[key] for key in WRITTEN & schema.keys()})
        of_json = {**schema, "type": sorted(kinds - {"string"})}
    if rules is None or not some_text_matches(rules):
        return None
    if not says_types:
        rules = (*rules, r"(\s*[^\s\[({\"'](.|\n)*)?" if rules else r"(\s*[^\s\[({](.|\n)*)?")
    return TextRule(rules, or_json=of_json)


def _takes_any_text(schema: Mapping[str, Any], kinds: set[str]) -> bool:
    """Return whether every text is valid for a schema, be it read as a text or as the JSON that it may be."""
    if kinds and not {"string"} < kinds <= _SCALARS:
        return False
    stack: list[Any] = [schema]
    while stack:
        one = stack.pop()
        if not isinstance(one, Mapping) or one.keys() - {"type", "anyOf"} - SILENT:
            return False
        stack += one["anyOf"] if isinstance(one.get("anyOf"), list) else ()
    return True


class _Keyed:
    """The forms of values in a notation that marks texts, for the functions of one request."""

    def __init__(self, sorts_keys: bool, marks: Sequence[str]) -> None:
        """No text may contain one of `marks`: it would end the text or the call."""
        self._sorts_keys, self._marks, self._num_left = sorts_keys, [mark for mark in marks if mark], _MAX_KEYED

    def value(self, schema: Any, root: Mapping[str, Any], depth: int = 0) -> KeyedValue | None:
        """Return the form of the values of `schema`; None if the notation cannot express them or they are too many."""
        self._num_left -= 1
        if self._num_left < 0:
            return None
        inner = partial(self.value, root=root, depth=depth + 1)
        while isinstance(schema, Mapping) and (target := _referred(schema, root)) is not None:
            depth += 1
            if schema.keys() & _BESIDE_REFS or depth > _MAX_DEPTH:
                return None
            schema = target
        if schema is True or schema == {}:
            return KeyedChoice()
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or schema.keys() - _OF_KEYED:
            return None
        if (values := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
            if not isinstance(values, list) or not values or schema.keys() - {"enum", "const", "type", *SILENT}:
                return None
            texts = tuple(value for value in values if isinstance(value, str))
            if any(mark in text for mark in self._marks for text in texts):
                return None
            others = [value for value in values if not isinstance(value, str)]
            kinds = schema_types(schema, root)
            kinds |= {"integer"} if "number" in kinds else set()
            if any(json_type(value) not in kinds & _SCALARS for value in values):
                return None
            parts: list[KeyedValue | None] = [texts] if texts else []
            return _choice([*parts, KeyedScalar({"enum": others})] if others else parts)
        if "anyOf" in schema:
            given = schema["anyOf"]
            is_alone = isinstance(given, list) and given and schema.keys() <= {"anyOf", *SILENT}
            return _choice([inner(one) for one in given]) if is_alone else None
        kinds = schema_types(schema, root)
        if not kinds:
            return None if schema.keys() - SILENT else KeyedChoice()
        found = list[KeyedValue | None]()
        if scalars := sorted(kinds & (_SCALARS - {"string"})):
            found.append(KeyedScalar({"type": scalars, **{key: schema[key] for key in _OF_NUMBERS & schema.keys()}}))
        if "string" in kinds:
            rules = text_rules({key: schema[key] for key in WRITTEN & schema.keys()})
            found.append(None if rules is None or not some_text_matches(rules) else TextRule(rules))
        if "array" in kinds:
            item = inner(schema.get("items", True))
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            is_bounded = type(least) is int and (most is None or (type(most) is int and least <= most <= _MAX_ITEMS))
            is_bounded = is_bounded and 0 <= least <= _MAX_ITEMS
            found.append(KeyedList(item, least, most) if item is not None and is_bounded else None)
        if "object" in kinds:
            found.append(self._object(schema, inner, is_top=depth == 0))
        return _choice(found) if kinds <= {*_SCALARS, "array", "object"} else None

    def _object(
        self, schema: Mapping[str, Any], inner: Callable[[Any], KeyedValue | None], *, is_top: bool
    ) -> KeyedValue | None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return None
        properties = {name: one for name, one in properties.items() if one is not False} if is_top else properties
        if set(map(str, required)) - set(properties):
            return None
        if not properties:
            others = schema.get("additionalProperties", not is_top)
            return KeyedObject({}) if others is False else KeyedObject(None) if others is True and not is_top else None
        fields = {}
        for name in sorted(properties, key=str.lower) if self._sorts_keys else properties:
            value = inner(properties[name])
            if value is None or name != name.strip() or not name or set(name) & set('{}[],:"<>\n'):
                return None
            fields[name] = value, name in required
        return KeyedObject(fields)


def _choice(options: Sequence[KeyedValue | None]) -> KeyedValue | None:
    known = tuple(one for one in options if one is not None)
    if not known or len(known) < len(options):
        return None
    return known[0] if len(known) == 1 else KeyedChoice(known)


def _enumerated(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the only values of a schema, if they are texts."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else None


def _rules(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> tuple[str, ...] | None:
    """Return the expressions that a text of `schema` must match; None if they cannot say it."""
    rules, stack = list[str](), [schema]
    while stack:
        one = stack.pop()
        if not isinstance(one, Mapping) or one.keys() & _OF_TEXTS - WRITTEN or (written := text_rules(one)) is None:
            return None
        rules += written
        stack += one["allOf"] if isinstance(one.get("allOf"), list) else ()
        for name in ("anyOf", "oneOf"):
            given = one[name] if isinstance(one.get(name), list) else ()
            parts = [part for part in given if schema_types(part, root) != {"null"}]
            if len(parts) < 2:
                stack += parts
                continue
            if name == "oneOf":  # a text may match several
                return None
            found = [_rules(part, root, depth + 1) for part in parts] if depth < _MAX_DEPTH else [None]
            if all(rule == () for rule in found):
                continue
            if not all(rule is not None and len(rule) == 1 for rule in found):
                return None
            rules.append(f"({'|'.join(rule[0] for rule in found if rule)})")
    return tuple(rules)


def resolve_ref(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follow the references of `schema` by their place in `root`, and return the last schema. Keywords beside a
    reference are dropped."""
    for _ in range(_MAX_DEPTH):
        target = _referred(schema, root)
        if target is None:
            break
        schema = target
    return schema


def _referred(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schema that the reference in `schema` means; None if it has none, or one without a place."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    target: Any = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            target = target[int(name)] if name.isdecimal() and len(name) < 9 and int(name) < len(target) else None
        else:
            target = target.get(name) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) else None


def _parts(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield `schema` and the schemas in its allOf, anyOf and oneOf, behind references, each once."""
    seen, stack = set[int](), [schema]
    while stack:
        one = resolve_ref(stack.pop(), root)
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        stack += (part for name in ("allOf", "anyOf", "oneOf") if isinstance(one.get(name), list) for part in one[name])


def property_names(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """Return the names of the properties of an object with `schema`, behind references and in allOf, anyOf and oneOf
    too."""
    found = dict[str, None]()
    for one in _parts(schema, root):
        properties = one.get("properties")
        found |= dict.fromkeys(properties if isinstance(properties, Mapping) else ())
    return list(found)


def property_schema(schema: Any, key: str, root: Mapping[str, Any]) -> Any:
    """Return the schema of the property `key` of an object with `schema`, or of the items of a list if `key` is "item".
    It may stand behind references and in allOf, anyOf and oneOf. If no part names the key, the schema is that of
    additionalProperties, or None. Parts without a type are left out if another part states one."""
    found, others = list[Any](), list[Any]()
    for one in _parts(schema, root):
        properties = one.get("properties")
        if key == "item" and "items" in one:
            found.append(one["items"])
        elif isinstance(properties, Mapping) and key in properties:
            found.append(properties[key])
        elif isinstance(one.get("additionalProperties"), Mapping):
            others.append(one["additionalProperties"])
    found = found or others
    if len(found) > 1:
        found = [one for one in found if schema_types(one, root) - {"unknown"}] or found
    return {"anyOf": found} if len(found) > 1 else found[0] if found else None


def schema_types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that the top level of a schema allows, with "unknown" for types that it does not state."""
    return set(_types(schema, root, {}, 0))


def _types(schema: Any, root: Mapping[str, Any], known: dict[int, set[str]], depth: int) -> set[str]:
    """Return the types of a schema. `known` has those of schemas that were looked at, by their id: each is looked at
    once."""
    schema = resolve_ref(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = set()
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    found = {kind for kind in kinds if isinstance(kind, str)}
    all_of = schema.get("allOf")
    for part in all_of if isinstance(all_of, list) else ():
        if types := _types(part, root, known, depth + 1) - {"unknown"}:  # a value has the types of all parts
            found = (found & types or found) if found else types
    for name in ("anyOf", "oneOf"):
        parts = schema.get(name)
        for part in parts if isinstance(parts, list) else ():
            found |= _types(part, root, known, depth + 1) or {"unknown"}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not found and isinstance(values, list) and values:
        found = {json_type(value) for value in values}
    known[id(schema)] = found
    return found


def json_type(value: object) -> str:
    """Return JSON Schema's name of a value's type."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "unknown")
