"""`python -m octavo.entrypoints.openai.api_server --model MODEL …`, `octavo serve` under vLLM's name. It also exports
the names of `vllm_compat`, which programs written for vLLM import from this module."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from octavo.processes import import_path

if TYPE_CHECKING:
    from octavo.entrypoints.openai.vllm_compat import *  # noqa: F403

# Names of vLLM's module that Octavo lacks, and what to do instead.
_ABSENT = {
    "router": "app.add_route(path, function, methods=[...]) adds a route to what build_app returns",
    "run_server_worker": "run_server serves all engines from one process",
    "setup_server": "run_server binds the port",
}


def __getattr__(name: str) -> Any:
    """Load a name of `vllm_compat` with its first use, because a server's start needs none of them."""
    if not name.startswith("_"):
        from octavo.entrypoints.openai import vllm_compat

        if name in vllm_compat.__all__:
            return getattr(vllm_compat, name)
    why = f": {_ABSENT[name]}" if name in _ABSENT else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{why}")


if __name__ == "__main__":
    sys.path[:] = import_path()
    from octavo.entrypoints.cli.serve import main

    sys.exit(main(prog="octavo.entrypoints.openai.api_server"))
