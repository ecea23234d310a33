"""What scripts for vLLM import from its `utils`. Octavo itself uses none of it."""

from __future__ import annotations

import uuid

from octavo.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser", "random_uuid"]


def random_uuid() -> str:
    """An id for a request, of 32 hexadecimal digits."""
    return uuid.uuid4().hex
