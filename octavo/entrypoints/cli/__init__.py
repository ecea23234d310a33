"""The command line. An error that the user can fix is printed as one line, with exit code 1 and without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from octavo.errors import OctavoError


def run_command(command: Callable[[], None]) -> int:
    """Run `command` and return the exit code. Bugs of Octavo keep their traceback."""
    try:
        command()
        sys.stdout.flush()  # flush here, where a reader that has gone is no error
    except OctavoError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has gone, as in `octavo complete | head -1`
        sys.stderr.close()
        return 141
    return 0
