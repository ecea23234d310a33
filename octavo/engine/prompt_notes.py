"""Notes of gateways about the prompts that this server was given, for other gateways and for their own restarts.

A gateway knows prompts by the hashes of their beginnings as texts, and sends these with a request. The server only
keeps what it is told, in the order of arrival, and forgets the oldest notes. `octavo.gateway.replica_router` writes and
reads them.
"""

import re
import secrets
from typing import Any

_MAX_PROMPTS = 8192
_MAX_READ = 512  # prompts of one reading
# One prompt's names. Other characters may be longer in JSON, and gateways read no more than 1 MiB at once.
_NAMES = re.compile(r"[-,0-9a-z]{1,1024}")


class PromptNotes:
    """The notes of one server, or of all front ends of one."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(8)  # a reader that knows another id begins anew
        self._prompts: list[str] = []
        self._num_dropped = 0

    def add(self, names: str) -> None:
        """Note a prompt, by the names of its beginnings. What can be no names is ignored."""
        if _NAMES.fullmatch(names) is None:
            return
        self._prompts.append(names)
        if len(self._prompts) >= 2 * _MAX_PROMPTS:
            del self._prompts[:_MAX_PROMPTS]
            self._num_dropped += _MAX_PROMPTS

    def read(self, id: str, after: int) -> dict[str, Any]:
        """Return the next notes for a reader that has the first `after` ones of the notes `id`; after a restart they
        have another `id`, and the reader gets the oldest. "next" is the reader's next `after`."""
        begin = min(max(0, after - self._num_dropped), len(self._prompts)) if id == self._id else 0
        found = self._prompts[begin : begin + _MAX_READ]
        end = begin + len(found)
        has_more = end < len(self._prompts)
        return {"id": self._id, "next": self._num_dropped + end, "has_more": has_more, "prompts": found}
