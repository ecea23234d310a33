"""`python -m octavo.entrypoints.openai.api_server --model MODEL …`, which is `octavo serve` under vLLM's name."""

from __future__ import annotations

import sys

from octavo.entrypoints.cli.serve import main

if __name__ == "__main__":
    sys.exit(main(prog="octavo.entrypoints.openai.api_server"))
