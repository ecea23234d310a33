"""`python -m octavo.entrypoints.openai.api_server --model MODEL …`, which is `octavo serve` under vLLM's name."""

from __future__ import annotations

import sys

from octavo.processes import import_path

if __name__ == "__main__":
    sys.path[:] = import_path()
    from octavo.entrypoints.cli.serve import main

    sys.exit(main(prog="octavo.entrypoints.openai.api_server"))
