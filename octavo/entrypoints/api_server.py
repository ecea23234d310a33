"""`python -m octavo.entrypoints.api_server --model MODEL …`: vLLM's plain server with the route POST /generate.

It is the whole server under vLLM's name, and has `/generate` and `/health` where scripts expect them.
"""

import sys

from octavo.processes import import_path

if __name__ == "__main__":
    sys.path[:] = import_path()
    from octavo.entrypoints.cli.serve import main

    sys.exit(main(prog="octavo.entrypoints.api_server"))
