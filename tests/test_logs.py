"""The two forms of the log."""

from __future__ import annotations

import json
import logging
import sys

from octavo.logs import JsonFormatter


def record(message: str, *args: object, **fields: object) -> logging.LogRecord:
    made = logging.getLogger("octavo.test").makeRecord(
        "octavo.test", logging.WARNING, __file__, 1, message, args, None, extra=fields
    )
    made.created, made.msecs = 1.5, 500.0
    return made


def test_a_record_is_one_line_of_json() -> None:
    line = JsonFormatter("core").format(record("two\nlines and %s", "ümläute", request_id="r-1", sizes={"a": 1}))
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("pid") > 0
    assert found == {
        "time": "1970-01-01T00:00:01.500Z", "level": "WARNING", "process": "core", "logger": "octavo.test",
        "message": "two\nlines and ümläute", "request_id": "r-1", "sizes": {"a": 1},
    }  # fmt: skip


def test_a_traceback_is_a_field() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        made = record("it failed")
        made.exc_info = sys.exc_info()
    line = JsonFormatter("server").format(made)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: broken")


def test_what_json_cannot_hold_is_shown_as_text() -> None:
    found = json.loads(JsonFormatter("server").format(record("odd", thing={1}, path=object)))
    assert found["path"] == "<class 'object'>"
