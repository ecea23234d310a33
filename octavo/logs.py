"""Where log lines go: to standard error, in one form for all processes, unless the program has its own logging."""

from __future__ import annotations

import logging


def configure_logging(process: str, level: int = logging.INFO, names: tuple[str, ...] = ("octavo",)) -> None:
    """Show the lines of these loggers from `level` up, with the name of the process. A program that has set up handlers
    of its own keeps them and gets the lines there."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{process}] %(message)s", "%m-%d %H:%M:%S"))
    for logger in map(logging.getLogger, names):
        if not (logging.getLogger().handlers or logger.handlers):
            logger.addHandler(handler)
            logger.setLevel(level)
            logger.propagate = False
