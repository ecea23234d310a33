"""The command line. An error that the user can fix is printed as one line, with exit code 1 and without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from octavo.errors import ConfigError, LoadError, OctavoError
from octavo.terminal_styles import DIM, RED, has_styles, styled

# What a person can do after an error, beside what its message says. Programs that read errors get the message alone.
_NEXT_STEPS: dict[type[OctavoError], str] = {
    ConfigError: "`octavo serve --help=WORD` explains the flags with WORD in their names.",
    LoadError: "`octavo doctor` checks this machine and the way to the hub; `octavo list` names the models here.",
}


def run_command(command: Callable[[], None]) -> int:
    """Run `command` and return the exit code. Bugs of Octavo keep their traceback."""
    try:
        command()
        sys.stdout.flush()  # flush here, where a reader that has gone is no error
    except OctavoError as error:
        show_error(str(error))
        if has_styles(sys.stderr) and (step := _NEXT_STEPS.get(type(error))):
            print(styled(step, DIM, sys.stderr), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has gone, as in `octavo complete | head -1`
        sys.stderr.close()
        return 141
    return 0


def show_error(text: str) -> None:
    """Print an error as a line, in colour on a terminal."""
    print(f"{styled('octavo: error:', RED, sys.stderr)} {text}", file=sys.stderr)
