"""Reads answers by the description of a format. One reader serves all formats, and looks at each character of a call
once."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.entrypoints.chat.reasoning import held_back
from octavo.entrypoints.chat.tools.call_spelling import property_names, property_schema, schema_types
from octavo.entrypoints.chat.tools.parameter_values import nested_value, parameter_value
from octavo.entrypoints.chat.tools.python_calls import ends_within_text, keyed_call, python_calls, python_list
from octavo.entrypoints.chat.tools.tool_formats import JsonCalls, KeyedValues, NamedJson, PythonCalls, Tags, ToolFormat
from octavo.entrypoints.chat.tools.tool_parser_base import (
    Call,
    Steps,
    TextParser,
    ToolSchemas,
    json_call,
    load_json,
    search,
    to_json,
    without_damaged_end,
)

_MAX_REREAD = 100_000  # characters of false calls, after which the rest of an answer is content
_MAX_HEAD = 512  # characters before the arguments of a `NamedJson`
_MAX_KEY = 128  # characters of a key without a schema that ends the argument before it
_MAX_ENDS = 16  # marks of a call's end that are looked at, each of which takes the time to read the call so far
_FENCE = "```"
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_NAME = re.compile(r"[\w.\-]{1,256}")
_COUNTED = re.compile(r"(?:functions?[._:\-])?([\w.\-]+?)[._:\-]\d+")
_CODE_FUNCTIONS = ("python", "ipython")
_CALL_SO_FAR = re.compile(r"\s{0,32}[\w.\-]{0,256}\(?")
_CALL_IN_CODE = re.compile(r"\s*([\w.\-]{1,256})\.call(\(.*\))\s*", re.DOTALL)
_NO_NAME = re.compile(r"[^\w.\-]")
_NO_SEPARATOR = re.compile(r"[^;, \n\t]")
_PIECES = re.compile(r"<[^<>\s]*>|[^<>\s]+|[<>]")
_BEGIN_LIST = re.compile(r"\[\s{0,32}[\w.\-]{1,256}\s{0,32}\(")
_BEGIN_LIST_SO_FAR = re.compile(r"\[\s{0,32}[\w.\-]{0,256}\s{0,32}")
_MAY_BEGIN_LIST = re.compile(r"\[\s{0,32}[\w.\-]{0,256}\s{0,32}\Z")


class FormatParser(TextParser):
    """Reads one answer in `form`. `thought_end` is the mark at the end of the reasoning, which models also write beside
    calls."""

    def __init__(self, form: ToolFormat, tools: ToolSchemas, thought_end: str = "") -> None:
        self._form = form
        marks = (form.open, form.start, form.end, form.close)
        self._open, self._start, self._end, self._close = (mark.strip() for mark in marks)
        self._separator = form.separator.strip("; ,\n\t")
        bodies = (form.body, *form.also)
        self._json = next((body for body in bodies if isinstance(body, JsonCalls)), None)
        self._other = next((body for body in bodies if not isinstance(body, JsonCalls)), None)
        self._tag = form.body.name_before.strip() if isinstance(form.body, Tags) else ""
        self._code_mark = form.code_mark
        self._marks = trigger_marks(form)
        if self._code_mark and not form.is_whole_answer:
            self._marks = (*self._marks, self._code_mark)
        self._thought_end = thought_end
        last = form.body.end.strip() if isinstance(form.body, NamedJson | Tags) else ""
        self._ends = [mark for mark in (last, self._end, self._close, self._thought_end) if mark]
        self._any_mark = re.compile("|".join(map(re.escape, self._marks)))
        self._num_unclosed = 0  # values of tags without an end
        self._blanks = ""  # before the last mark; content if the mark is content
        self._head = _head(self._other) if isinstance(self._other, NamedJson) else None
        super().__init__(tools)

    def _read(self) -> Steps[None]:
        if self._form.is_whole_answer:
            yield from self._read_whole_answer()
            return
        num_reread = 0
        while num_reread <= _MAX_REREAD and (mark := (yield from self._find_mark())) is not None:
            begin = self._begin
            yield from self._read_section(mark)
            if self._begin == begin:  # no call: search the text after the mark again for another mark
                num_reread += self._seen - begin
                is_last = self._is_whole and self._is_after_call and not self._text[begin:].strip()
                if not is_last:  # some models end a call with the mark of its begin
                    self._give(self._blanks + mark)
            self._seen = self._begin
        yield from self._give_rest()

    def _find_mark(self) -> Steps[str | None]:
        """Give the content before the next mark, and go behind the mark. Return the mark, or None without one."""
        longest = max(map(len, self._marks))
        while (found := search(self._text, self._any_mark, max(self._begin, self._seen - longest + 1))) is None:
            self._seen = end = len(self._text)
            if self._is_whole:
                return None
            tail = self._text[max(self._begin, end - longest) :]
            end -= max(held_back(tail, mark) for mark in self._marks)
            # Line breaks around calls are not content.
            self._give_until(self._begin + len(self._text[self._begin : end].rstrip()))
            yield
        before = self._text[self._begin : found.start()]
        self._give(before.rstrip())
        self._blanks = before[len(before.rstrip()) :]
        self._begin = self._seen = found.end()
        return found[0]

    def _read_section(self, mark: str) -> Steps[None]:
        """Give the calls after a mark, each when it is complete, and drop the marks around them. Without a call,
        nothing is dropped."""
        if mark == self._code_mark:
            yield from self._take_code()
            return
        yield from self._skip_opening(mark)
        pair = self._close if mark == self._open else self._end if mark == self._start else ""
        for closed in filter(None, self._ends if self._is_after_call else [pair]):  # no call is between the marks
            if (yield from self._skip_mark(closed)):
                self._begin = self._seen
                return
        if self._start and mark not in (self._start, self._tag):
            yield from self._skip_opening(self._start)
        is_after_tag = mark == self._tag
        while (calls := (yield from self._take_calls(is_after_tag))) is not None:
            self._give_calls(calls)
            yield from self._skip_ends()
            is_after_tag = False
            if self._separator:
                yield from self._skip_mark(self._separator)
            if self._start:
                if (yield from self._skip_mark(self._start)):
                    yield from self._skip_opening(self._start)
                    continue
                break
            if self._tag:
                is_after_tag = yield from self._skip_mark(self._tag)
                if not is_after_tag:
                    break
            elif not (yield from self._skip_spaces(_NO_SEPARATOR)) or self._text[self._seen] != "{":
                break

    def _skip_opening(self, mark: str) -> Steps[None]:
        """Pass over repetitions of the mark before a call, and the end of the reasoning."""
        while (yield from self._skip_mark(mark)):
            pass
        if self._thought_end and (yield from self._skip_mark(self._thought_end)):
            yield from self._skip_mark(mark)

    def _skip_ends(self) -> Steps[None]:
        """Pass over the marks behind a call, which models repeat and confuse."""
        marks, self._seen = list(self._ends), self._begin
        while marks:
            for mark in marks:
                if (yield from self._skip_mark(mark)):
                    break
            else:
                if (found := (yield from self._skip_damaged(marks, self._marks))) is None:
                    return
                mark = found
            self._begin = self._seen
            if mark == _FENCE:  # the next one begins a block of code
                marks.remove(mark)

    def _take_code(self) -> Steps[None]:
        """Give the call whose code is the rest of the answer. Without a function that takes code, give nothing."""
        begin = self._seen
        name = next((name for name in _CODE_FUNCTIONS if name in self._tools), None)
        keys = property_names(self._tools[name], self._tools[name]) if name is not None else []
        key = "code" if "code" in keys or not keys else keys[0] if len(keys) == 1 else None
        while True:
            head = _CALL_SO_FAR.match(self._text, begin)
            may_be_call = head is not None and (head[0].endswith("(") or head.end() == len(self._text))
            if (name is None or key is None) and not may_be_call:
                return
            if not (yield from self._more()):
                break
        self._seen = len(self._text)
        code = self._text[begin:]
        found = _CALL_IN_CODE.fullmatch(code)
        is_call = found is not None and found[1] in self._tools
        if found is not None and is_call and (read := python_list(f"[{found[1]}{found[2]}]")) is not None:
            self._give_calls(read[0])
            return
        if name is None or key is None or not code.strip():
            return
        value = load_json(code)
        if not isinstance(value, dict):
            value = {key: value if isinstance(value, str) else code}
        self._give_calls([Call(name, to_json(value))])

    def _read_whole_answer(self) -> Steps[None]:
        while True:
            if self._had_call and not (yield from self._skip_spaces(_NO_SEPARATOR)):
                break
            is_code = False
            for mark in self._form.skipped:
                if (yield from self._skip_mark(mark)):
                    is_code = is_code or mark == self._code_mark
            begin = self._seen
            if (calls := (yield from self._take_calls(is_after_tag=False))) is None:
                if is_code:
                    self._seen = begin
                    yield from self._take_code()
                break
            self._give_calls(calls)
        if self._had_call:
            yield from self._skip_ends()
        if not self._had_call and isinstance(self._form.body, PythonCalls):
            yield from self._find_python()
        yield from self._give_rest()

    def _find_python(self) -> Steps[None]:
        """Give the content before a list of calls of known functions, and the calls. Without such a list, give
        nothing."""
        names = "|".join(map(re.escape, self._tools))
        start = re.compile(rf"\[\s{{0,32}}(?:{names})\s{{0,32}}\(")
        self._seen = self._begin
        while (found := search(self._text, start, self._seen)) is None:
            held = _MAY_BEGIN_LIST.search(self._text, max(self._begin, len(self._text) - 2 * _MAX_HEAD))
            shown = self._text[self._begin : held.start() if held else len(self._text)].rstrip()
            self._give_until(self._begin + len(shown))
            self._seen = self._begin
            if not (yield from self._more()):
                return
        begin = found.start()
        self._give_until(self._begin + len(self._text[self._begin : begin].rstrip()))
        while (yield from self._more()):
            pass
        listed = search(self._text, start, 0)
        read = None if listed is None else python_list(self._text[listed.start() :])
        if listed is not None and read is not None:
            self._seen = listed.start() + read[1]
            self._give_calls(read[0])
            yield from self._skip_ends()

    def _take_calls(self, is_after_tag: bool) -> Steps[list[Call] | None]:
        """Return the calls that begin here, and go behind them. Return None if the text is no call."""
        if not (yield from self._skip_spaces()):
            return None
        if self._json is not None and not is_after_tag and self._text[self._seen] in "{[":
            return (yield from self._take_json_calls(self._json))
        body = self._other
        if isinstance(body, NamedJson):
            return (yield from self._take_named(body))
        if isinstance(body, Tags):
            return (yield from self._take_tags(body, is_after_tag))
        if isinstance(body, PythonCalls):
            return (yield from self._take_python())
        if isinstance(body, KeyedValues):
            text = yield from self._take_until_outside(self._end, lambda text: text.count(body.quote) % 2 > 0)
            call = None if self._is_cut and "{" not in text else keyed_call(text, body, self._tools)
            return None if call is None else [call]
        return None

    def _take_json_calls(self, body: JsonCalls) -> Steps[list[Call] | None]:
        value = yield from self._take_json()
        if value == [] and not self._form.is_whole_answer:
            return []
        items = value if isinstance(value, list) else [value]
        if not body.name:
            items = [
                {"name": next(iter(item)), "arguments": next(iter(item.values()))}
                if isinstance(item, dict) and len(item) == 1
                else item
                for item in items
            ]
        names = (body.arguments, "arguments", "parameters")
        calls = [
            json_call(item, names, body.name) or (json_call(item, names) if body.name != "name" else None)
            for item in items
            # In a format without marks, an object with only a name is no call.
            if not self._form.is_whole_answer or _has_arguments(item, names)
        ]
        found = [call for call in calls if call is not None]
        return found if found and len(found) == len(items) else None

    def _take_named(self, body: NamedJson) -> Steps[list[Call] | None]:
        assert self._head is not None
        begin = self._seen
        stop = self._end or self._start  # the next call's
        while (brace := self._text.find("{", self._seen, begin + _MAX_HEAD)) < 0:
            if stop and stop in self._text[begin : begin + _MAX_HEAD]:
                break
            self._seen = len(self._text)
            if self._seen - begin >= _MAX_HEAD or (self._is_whole and self._is_cut):
                return None
            if not (yield from self._more()):
                break
        end = self._text.find(stop, begin, begin + _MAX_HEAD) if stop else -1
        end = len(self._text) if brace < 0 and end < 0 else end
        is_bare = end >= 0 and (brace < 0 or end < brace)  # a call without arguments
        self._seen = end if is_bare else brace
        written = " ".join(self._text[begin : self._seen].split())
        head = self._head.fullmatch(written.removesuffix(body.end.strip()) if is_bare else written)
        if is_bare and self._form.text_start and "\n" not in self._text[begin : self._seen]:
            return None  # a mark in a text
        # Without a mark of its own a call is known by its name only.
        if head is None or ((is_bare or self._form.text_start) and head["name"] not in self._tools):
            return None
        value = {} if is_bare else (yield from self._take_json())
        if not isinstance(value, dict):
            return None
        if body.end:
            yield from self._skip_mark(body.end.strip())
        name = self._fitting(head["name"], value)
        if name is None:
            return None
        own_id = head.groupdict().get("id") or ("" if head["id_part"] is None else head["head"])
        return [Call(name, to_json(value), own_id)]

    def _fitting(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Return the function's name. Models sometimes write a namespace before it, an id with other signs where ids
        count the calls (`functions_f_2`), or only a counter; then the only function that takes these arguments is
        meant."""
        if name in self._tools:
            return name
        counted = _COUNTED.fullmatch(name) if self._form.counts_calls else None
        if counted is not None and counted[1] in self._tools:
            return counted[1]
        if (last := name.rpartition(".")[2]) in self._tools:
            return last
        if not name.isdigit():
            return name
        fits = []
        for known, schema in self._tools.items():
            properties, required = schema.get("properties"), schema.get("required")
            keys = properties if isinstance(properties, Mapping) else {}
            if arguments.keys() <= keys.keys() and set(required or ()) <= arguments.keys():
                fits.append(known)
        return fits[0] if len(fits) == 1 else None

    def _take_tags(self, body: Tags, is_after_tag: bool) -> Steps[list[Call] | None]:
        if self._tag and not is_after_tag and not (yield from self._skip_mark(self._tag)):
            return None
        name = yield from self._take_name()
        if name is None:
            return None
        if body.index and (yield from self._take_until(body.name_after)) is None:
            return None
        after = body.name_after.strip()
        if not body.index and after and not (yield from self._skip_mark(after)):
            return [Call(name, "{}")] if (yield from self._skip_self_closing(body)) else None
        schema = self._tools.get(name, {})
        schemas = property_names(schema, schema)
        arguments: dict[str, Any] = {}
        end = body.end.strip() or self._end
        if body.json_before and (yield from self._skip_mark(body.json_before)):
            value = yield from self._take_json()
            if not isinstance(value, dict) or not (yield from self._skip_mark(body.json_after)):
                return None
            arguments = value
        elif not body.json_before and (yield from self._skip_spaces()) and self._text[self._seen] == "{":
            begin, value = self._seen, (yield from self._take_json())
            if isinstance(value, dict) and end and (yield from self._skip_mark(end)):
                return [Call(name, to_json(value))]
            self._seen = begin
        # The model may have forgotten the mark at the end of a call.
        ends = [self._end, self._close, *((self._start, self._tag) if name in self._tools else ())]
        while True:
            if end and (yield from self._skip_mark(end)):
                return [Call(name, to_json(arguments))]
            begin = self._seen
            for mark in filter(None, ends):
                if (yield from self._skip_mark(mark)):
                    self._seen = begin
                    return [Call(name, to_json(arguments))]
            if not (yield from self._skip_mark(body.key_before)):
                break
            key = yield from self._take_until(body.key_after)
            if key is None or not key.strip() or "\n" in key:
                return None
            attributes = ""
            if body.value_before.strip():
                before = yield from self._take_until(body.value_before.strip())
                if before is None:
                    return None
                attributes = before
            key = key.strip()
            others = [one for one in schemas if one != key and one not in arguments] if schemas else None
            if others is None and body.has_nested:
                others = []  # a key may be one of the value
            value = yield from self._take_value(body, key, attributes, schema, others)
            if value is None:
                return None
            arguments[key] = value[0]
        is_damaged = bool(end) and (yield from self._skip_damaged([end], self._marks)) is not None
        if is_damaged and not (self._is_cut and self._seen == len(self._text)):
            return [Call(name, to_json(arguments))]
        is_over = not (yield from self._skip_spaces()) and not self._is_cut and name in self._tools
        return [Call(name, to_json(arguments))] if is_over or not end else None

    def _skip_self_closing(self, body: Tags) -> Steps[bool]:
        """Go behind `/>` after a name, as in `<invoke name="f"/>`. Return whether it was there."""
        begin, mark = self._seen, body.name_after.strip()
        has_name_after = mark.endswith(">") and (len(mark) == 1 or (yield from self._skip_mark(mark[:-1])))
        if has_name_after and (yield from self._skip_mark("/>")):
            return True
        self._seen = begin
        return False

    def _take_value(
        self, body: Tags, key: str, attributes: str, schema: Mapping[str, Any], others: list[str] | None
    ) -> Steps[tuple[Any] | None]:
        """Return the value of a parameter, in a tuple, and go behind the mark after it. If the model forgot the mark,
        the value ends at the next of the `others` (any key if None), or with the call. Return None if no end comes."""
        own = property_schema(schema, key, schema)
        kinds = schema_types(own, schema)
        says_text = bool(body.text_attribute) and body.text_attribute.strip() in attributes
        says_json = bool(body.json_attribute) and body.json_attribute.strip() in attributes
        mark = body.value_after.replace("{key}", key).strip()
        begin = self._seen
        is_text = kinds == {"string"} or (says_text and (not kinds or "string" in kinds))
        if not is_text and (yield from self._skip_spaces()) and self._text[self._seen] in "{[":
            value = yield from self._take_json()  # JSON may contain the mark
            if value is not None and (yield from self._skip_mark(mark)):
                return (value,)
        self._seen = begin
        may_nest = not kinds or bool(kinds & {"array", "object", "unknown"})
        if body.has_nested and may_nest and self._num_unclosed < _MAX_ENDS:
            inner = yield from self._take_nested(body, key, mark)
            if inner is not None:
                return (nested_value(inner, body, own, schema),)
            self._seen = begin
        if body.has_cdata and (yield from self._skip_mark(_CDATA)):
            inner = yield from self._take_until(_CDATA_END + mark)
            if inner is not None:
                return (parameter_value(inner, kinds),)
            self._seen = begin
        text = yield from self._take_until_next(body, mark, others)
        if text is None:
            return None
        if body.value_before.endswith("\n"):
            text = text.removeprefix("\n")
        if body.value_after.startswith("\n"):
            text = text.removesuffix("\n")
        return (parameter_value(text, kinds, says_text=says_text, says_json=says_json),)

    def _take_nested(self, body: Tags, key: str, closed: str) -> Steps[str | None]:
        """Return a value of tags, which may have tags of the same key, and go behind the mark after it. Return None if
        it is not of tags, or has no end in the call."""
        begin, opened = self._seen, f"{body.key_before}{key}{body.key_after}"
        if not (yield from self._skip_mark(body.key_before)):
            return None
        self._seen -= len(body.key_before)
        marks, level = [opened, closed, body.end.strip() or self._end], 1
        any_mark = re.compile("|".join(map(re.escape, filter(None, marks))))
        while level:
            if (found := search(self._text, any_mark, self._seen)) is None:
                self._seen = max(self._seen, len(self._text) - max(map(len, marks)) + 1)
            elif found[0] not in (opened, closed):
                break
            else:
                level += 1 if found[0] == opened else -1
                self._seen = found.end()
                continue
            if not (yield from self._more()):
                break
        self._num_unclosed += level > 0
        return None if level else self._text[begin : self._seen - len(closed)]

    def _take_until_next(self, body: Tags, mark: str, others: list[str] | None) -> Steps[str | None]:
        """Return the text before the next `mark` that ends an argument and go behind the mark, or the text before
        anything else that ends an argument."""
        keys = rf"[^<>\s]{{1,{_MAX_KEY}}}" if others is None else "|".join(map(re.escape, others))
        ends = [text for text in (body.end.strip(), self._end) if text]
        stops: dict[str, str] = {}  # by the mark at the beginning
        if keys:
            stops[body.key_before] = rf"{re.escape(body.key_before)}(?:{keys}){re.escape(body.key_after.strip())}"
        if len(ends) > 1:
            stops[ends[0]] = r"\s{0,8}".join(map(re.escape, ends))
        stop = re.compile("|".join(stops.values()) or r"(?!)")
        size = max([_MAX_KEY if others is None else 0, *map(len, others or ())])
        size += sum(map(len, (body.key_before, body.key_after, mark, *ends))) + 8  # longest stop, in characters
        begins = re.compile("|".join(map(re.escape, (mark, *stops))))
        longest = max(map(len, (mark, *stops)))
        begin = scanned = self._seen
        marks = list[int]()  # where the mark is part of the text, unless no end comes
        while True:
            found = search(self._text, begins, scanned)
            self._seen = len(self._text)
            if found is None:
                scanned = max(scanned, len(self._text) - longest + 1)
            elif self._text.startswith(mark, found.start()):
                self._seen = scanned = found.start() + len(mark)
                if (yield from self._goes_on_after_value(body, mark)):
                    return self._text[begin : found.start()]
                marks.append(found.start())
                if len(marks) == _MAX_ENDS:
                    break
                continue
            elif stop.match(self._text, found.start()):
                self._seen = found.start()
                return without_damaged_end(self._text[begin : self._seen], mark)
            elif len(self._text) - found.start() >= size or self._is_whole:
                scanned = found.start() + 1
                continue
            else:
                scanned = found.start()
            if not (yield from self._more()):
                break
        if marks:
            self._seen = marks[0] + len(mark)
            return self._text[begin : marks[0]]
        last = [at for end in ends if (at := self._text.find(end, begin)) >= 0]
        self._seen = min(last, default=len(self._text))
        return without_damaged_end(self._text[begin : self._seen], mark) if last else None

    def _goes_on_after_value(self, body: Tags, mark: str) -> Steps[bool]:
        """Return whether the text from here on is that after an argument: another one, or the end of the call or of the
        answer. Then go behind the repeated end marks of models."""
        while (yield from self._skip_mark(mark)):
            pass
        begin, is_over = self._seen, not (yield from self._skip_spaces())
        ends = list(filter(None, (body.end.strip(), self._end, self._close)))
        for follows in (body.key_before.strip(), *ends):
            is_over = is_over or (yield from self._skip_mark(follows))
        is_over = is_over or (yield from self._skip_damaged(ends, self._marks)) is not None
        self._seen = begin
        return is_over

    def _take_until_outside(self, mark: str, is_within: Callable[[str], bool]) -> Steps[str]:
        """Return the text before the first `mark` that is not within a text of an argument, and go behind the mark. If
        the model forgot the mark, all text before the next call is before it."""
        begin, marks = self._seen, [one for one in (mark, self._start) if one]
        any_mark, longest = re.compile("|".join(map(re.escape, marks))), max(map(len, marks))
        for num in range(1, _MAX_ENDS + 1):
            scanned = self._seen
            while (found := search(self._text, any_mark, max(scanned, self._seen - longest + 1))) is None:
                self._seen = len(self._text)
                if not (yield from self._more()):
                    return without_damaged_end(self._text[begin:], mark)
            text, self._seen = self._text[begin : found.start()], found.end()
            if num < _MAX_ENDS and is_within(text):
                continue
            if found[0] != mark:
                self._seen = found.start()
                text = without_damaged_end(text, mark)
            break
        return text

    def _take_name(self) -> Steps[str | None]:
        if not (yield from self._skip_spaces()):
            return None
        begin = self._seen
        yield from self._skip_spaces(_NO_NAME)  # goes to the end of the name
        name = self._text[begin : self._seen]
        return name if _NAME.fullmatch(name) else None

    def _take_python(self) -> Steps[list[Call] | None]:
        if self._form.is_whole_answer:
            while not _BEGIN_LIST.match(self._text, self._seen):
                if not _BEGIN_LIST_SO_FAR.fullmatch(self._text, self._seen) or not (yield from self._more()):
                    return None
        begin = self._seen
        text = yield from self._take_until_outside(self._end or self._close, ends_within_text)
        calls = python_calls(text)
        if calls is None and self._form.is_whole_answer and (read := python_list(text)) is not None:
            calls, self._seen = read[0], begin + read[1]
        return calls


def _has_arguments(item: Any, names: Sequence[str]) -> bool:
    item = item.get("function", item) if isinstance(item, dict) else None
    return isinstance(item, dict) and not item.keys().isdisjoint(names)


def trigger_marks(form: ToolFormat) -> tuple[str, ...]:
    """Return the marks that begin only calls, longest first; none if calls are the whole answer. Tags with a name are
    included, because models sometimes forget the outer marks."""
    if form.is_whole_answer:
        return ()
    tag = form.body.name_before if isinstance(form.body, Tags) else ""
    marks = {form.open.strip(), form.start.strip(), tag.strip()} - {""}
    return tuple(sorted(marks, key=len, reverse=True))


def _head(body: NamedJson) -> re.Pattern[str]:
    """Return a pattern of the text before the arguments, with single blanks. Marks are optional, as models sometimes
    omit them; the name is required."""
    before = f"(?:{re.escape(body.before)})?" if body.before else ""
    if body.id_before:
        before = rf"(?:(?P<id>[\w\-]{{0,64}}) ?{re.escape(body.id_before)} ?)?{before}"
    own_id = body.may_have_id.replace("(", "(?P<id>", 1) if "(" in body.may_have_id else body.may_have_id
    may_have_id = f"(?P<id_part>{own_id})?" if own_id else "(?P<id_part>(?!))?"
    after = "".join(f" ?(?:{re.escape(piece)})?" for piece in _PIECES.findall(body.after))
    return re.compile(rf"(?P<head>{before}(?P<name>[\w.\-]{{1,256}}?){may_have_id}){after} ?")
