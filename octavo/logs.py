"""Sends log lines to standard error, in one form for all processes, unless the program has its own logging.

The form is text for people, or JSON for machines: one object a line, with the traceback inside where there is one.
"""

import json
import logging
import os
import time

TEXT, JSON = "text", "json"
# Fields of every LogRecord; other fields came with `extra=`.
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}

_ENCODER = json.JSONEncoder(default=str)
_current_format = TEXT
UNKNOWN_ROUTE = "(unknown route)"  # instead of a path that no route has, which may be any text of a client
LINES_PER_SECOND = 5  # of a kind that any client can cause


class LineLimit:
    """Counts the lines of a kind that any client can cause, with no key: without a limit they could fill the disk."""

    def __init__(self) -> None:
        self._second = self._num_lines = 0

    def admits(self, now: float) -> bool:
        """Return whether a line may be written, `LINES_PER_SECOND` at most in each second."""
        if (second := int(now)) != self._second:
            self._second, self._num_lines = second, 0
        self._num_lines += 1
        return self._num_lines <= LINES_PER_SECOND


class _FewWarnings(logging.Filter):
    """Limits uvicorn's warnings, each of which is about what a client has sent before its key was read."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = LineLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno != logging.WARNING or self._limit.admits(record.created)


_few_warnings = _FewWarnings()


def current_format() -> str:
    """Return the log format of this process, which its child processes use too."""
    return _current_format


def configure_logging(
    process: str, level: int = logging.INFO, names: tuple[str, ...] = ("octavo",), *, log_format: str = TEXT
) -> None:
    """Show the lines of these loggers from `level` up, with the name of the process. A program with its own handlers
    keeps them and gets the lines there."""
    global _current_format
    _current_format = log_format
    handler = logging.StreamHandler()
    if log_format == JSON:
        handler.setFormatter(JsonFormatter(process))
        logging.captureWarnings(True)
        names = (*names, "py.warnings")
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{process}] %(message)s", "%m-%d %H:%M:%S"))
    logging.getLogger("uvicorn.error").addFilter(_few_warnings)
    for logger in map(logging.getLogger, names):
        if not (logging.getLogger().handlers or logger.handlers):
            logger.addHandler(handler)
            logger.setLevel(level)
            logger.propagate = False


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time (UTC), level, process, pid, logger, message, fields of `extra=`, and
    the traceback as `exception`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _ENCODER.encode(line)
