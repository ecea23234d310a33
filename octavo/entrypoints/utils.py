"""What servers written for vLLM import from its module of this name."""

from __future__ import annotations


def cli_env_setup() -> None:
    """vLLM sets by a variable how its workers are started. Octavo's need none, so that nothing is left to do."""
