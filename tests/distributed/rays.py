"""Ray for tests, whose environment lacks it: installed beside that, for one process that is given its folder."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.installing import why_not


def install_ray(folder: Path) -> str | None:
    """Install it there. Returns why that cannot be done, if so. `folder` is to lie behind what the environment has."""
    if shutil.which("uv") is not None:
        installing = ["uv", "pip", "install", "--python", sys.executable]
    elif find_spec("pip") is not None:
        installing = [sys.executable, "-m", "pip", "install"]
    else:
        return "there is neither uv nor pip to install Ray with"
    reason = why_not([*installing, "--target", str(folder), "ray>=2.50"])
    return f"Ray cannot be installed here: {reason}" if reason else None
