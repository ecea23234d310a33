"""`FlexibleArgumentParser` under the name of vLLM's module: `FlagParser`."""

from octavo.flags import FlagParser as FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
