"""What scripts for vLLM import from its `utils`. Octavo itself uses none of it."""

from __future__ import annotations

import uuid

from octavo.utils.argparse_utils import FlexibleArgumentParser
from octavo.utils.network_utils import get_open_port

__all__ = ["FlexibleArgumentParser", "get_open_port", "random_uuid"]


def random_uuid() -> str:
    """An id for a request, of 32 hexadecimal digits."""
    return uuid.uuid4().hex
