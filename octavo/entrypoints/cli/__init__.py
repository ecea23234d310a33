"""The command line. An error that the user can fix is printed as one line, with exit code 1 and without a traceback."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from octavo.errors import ConfigError, LoadError, OctavoError
from octavo.terminal_styles import DIM, RED, has_styles, styled

# Further advice for people after an error. Programs that read errors get the message alone.
_NEXT_STEPS: dict[type[OctavoError], str] = {
    ConfigError: "`octavo serve --help=WORD` explains the flags with WORD in their names.",
    LoadError: "`octavo doctor` checks this machine and the way to the hub; `octavo list` names the models here.",
}


class CommandFunction(Protocol):
    """A command as `main` runs it: takes the words of its command line and returns the exit code."""

    def __call__(self, argv: Sequence[str] | None = None, *, prog: str = ...) -> int: ...


def command(
    make_parser: Callable[[str], ArgumentParser], prog: str
) -> Callable[[Callable[[Namespace], int | None]], CommandFunction]:
    """Make a command of a function that takes parsed arguments and may return an exit code."""

    def make(function: Callable[[Namespace], int | None]) -> CommandFunction:
        def run(argv: Sequence[str] | None = None, *, prog: str = prog) -> int:
            return run_command(partial(function, make_parser(prog).parse_args(argv)))

        return run

    return make


def check_lists_took_no_model(args: Namespace, names: Iterable[str]) -> None:
    """Raise `ConfigError` if the last value of a list flag, of the fields `names`, looks like the model: argparse gives
    a list all words up to the next flag. Call it only if no model is given."""
    from octavo.loading.checkpoint import is_hub_id

    for name in names:
        values = getattr(args, name, None)
        if not isinstance(values, list) or not values:
            continue
        if name == "lora_modules" and "=" in values[-1]:  # NAME=PATH, whose file may be a .gguf too
            continue
        last = os.path.expanduser(values[-1])
        is_model = last.endswith(".gguf") or os.path.isfile(os.path.join(last, "config.json"))
        is_model = is_model or (os.path.isdir(last) and any(one.endswith(".gguf") for one in os.listdir(last)))
        if is_model or (len(values) > 1 and "/" in values[-1] and is_hub_id(values[-1])):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(  # without the value, which may be a key
                f"there is no MODEL, and the last value of {flag} looks like one: a list takes all words up to the "
                f"next flag. Put the model first: MODEL {flag} …"
            )


def run_command(command: Callable[[], int | None]) -> int:
    """Run `command` and return the exit code. Bugs of Octavo keep their traceback."""
    try:
        code = command()
        sys.stdout.flush()  # flush here, where a closed pipe is no error
    except OctavoError as error:
        show_error(str(error))
        if has_styles(sys.stderr) and (step := _NEXT_STEPS.get(type(error))):
            print(styled(step, DIM, sys.stderr), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the output's reader has closed it, as in `octavo complete | head -1`
        sys.stderr.close()
        return 141
    return code or 0


def show_error(text: str) -> None:
    """Print an error as a line, in colour on a terminal."""
    print(f"{styled('octavo: error:', RED, sys.stderr)} {text}", file=sys.stderr)
