"""Packages that tests install beside their environment, from an index that may be slow or away."""

from __future__ import annotations

import subprocess
from typing import Any


def why_not(command: list[str], timeout_s: float = 120, **options: Any) -> str | None:
    """Run a command that installs something. Return the end of what it says if it fails or takes too long."""
    try:
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=timeout_s, **options
        )
    except subprocess.TimeoutExpired:
        return f"it takes longer than {timeout_s:g} s"
    except subprocess.CalledProcessError as error:
        return error.stderr.decode(errors="replace")[-500:]
    return None
