"""The command line, and how commands end: an error that is the user's to act on is one line and exit code 1, never a
traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from octavo.errors import OctavoError


def run_command(command: Callable[[], None]) -> int:
    """Run `command` and return the exit code. Errors that are Octavo's own keep their traceback."""
    try:
        command()
        sys.stdout.flush()  # here, where a reader that has gone is no error
    except OctavoError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `octavo complete | head -1`
        sys.stderr.close()
        return 141
    return 0
