"""`python -m octavo.entrypoints.api_server --model MODEL …`: vLLM's plain server, whose route is POST /generate.

It is the whole server under that name: `/generate` and `/health` are where scripts look for them.
"""

from __future__ import annotations

import sys

from octavo.processes import import_path

if __name__ == "__main__":
    sys.path[:] = import_path()
    from octavo.entrypoints.cli.serve import main

    sys.exit(main(prog="octavo.entrypoints.api_server"))
