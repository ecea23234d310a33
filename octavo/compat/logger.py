"""`init_logger`, under the name of vLLM's module. Where lines go is `octavo.logs`' business."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, cast

__all__ = ["init_logger"]

_LEVELS = {"debug_once": logging.DEBUG, "info_once": logging.INFO, "warning_once": logging.WARNING}

if TYPE_CHECKING:

    class OnceLogger(logging.Logger):
        """A logger that can say things once in the life of a process."""

        def debug_once(self, message: str, *args: Any) -> None: ...
        def info_once(self, message: str, *args: Any) -> None: ...
        def warning_once(self, message: str, *args: Any) -> None: ...


def init_logger(name: str) -> OnceLogger:
    """`logging.getLogger(name)`, with `debug_once`, `info_once` and `warning_once`: the same line comes once."""
    logger = cast("OnceLogger", logging.getLogger(name))
    for method, level in _LEVELS.items():
        if not hasattr(logger, method):
            setattr(logger, method, _once(logger, level))
    return logger


def _once(logger: logging.Logger, level: int) -> Any:
    @cache
    def say(message: str, *args: Any) -> None:
        logger.log(level, message, *args, stacklevel=2)

    return say
