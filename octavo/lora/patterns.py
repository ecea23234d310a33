"""Settings of adapters that depend on the module: keys are regular expressions from the adapter's author."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.loading.bounded_patterns import bounded_patterns


class ModulePatterns:
    """Values by pattern. The first key counts that matches a module's whole name, or the rest of the name after one of
    its dots (as in PEFT's `get_pattern_key`)."""

    def __init__(self, setting: str, patterns: Mapping[str, Any]) -> None:
        """Raises `LoadError` for a key that is no regular expression, and if matching may take too long."""
        self._patterns = list(zip(bounded_patterns(setting, patterns), patterns.values(), strict=True))

    def value(self, module: str, default: Any) -> Any:
        if not self._patterns:
            return default
        ends = [module, *(module[dot.end() :] for dot in re.finditer(r"\.", module))]
        for pattern, value in self._patterns:
            if any(pattern.fullmatch(end) for end in ends):
                return value
        return default
