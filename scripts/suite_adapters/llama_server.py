#!/usr/bin/env python3
"""Takes the place of llama-server for its own tests: serves with Octavo, with those of llama-server's flags that have a
counterpart. The model is OCTAVO_SUITE_MODEL or the default one, whatever the test asks for."""

from __future__ import annotations

import os
import sys

_FLAGS = {
    "--port": "--port", "--host": "--host", "--api-key": "--api-key", "--parallel": "--max-num-seqs",
    "--chat-template-file": "--chat-template",
}  # fmt: skip


def _parts(word: str) -> list[str]:
    """`--flag=value` as a flag and its value."""
    return word.split("=", 1) if word.startswith("--") else [word]


def main() -> None:
    flags, names = ["serve"], os.environ["OCTAVO_SUITE_NAMES"].split()
    given = [part for word in sys.argv[1:] for part in _parts(word)]
    for flag, value in zip(given, [*given[1:], ""], strict=True):
        if flag == "--alias":
            names.insert(0, value)
        elif flag in _FLAGS:
            flags += [_FLAGS[flag], value]
    flags += ["--served-model-name", *names] if names else []
    if model := os.environ.get("OCTAVO_SUITE_MODEL"):
        flags += ["--model", model]
    python = os.environ["OCTAVO_SUITE_PYTHON"]
    os.execv(python, [python, "-m", "octavo.entrypoints.cli.main", *flags])


if __name__ == "__main__":
    main()
