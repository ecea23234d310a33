"""Makes ids of calls in the form that the model's format and its chat template need."""

import hashlib
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class CallIdForm(Enum):
    """The form of ids."""

    LONG = "call_ and 24 hexadecimal digits, as OpenAI's"
    SHORT = "nine letters and digits, as Mistral's templates demand them"
    COUNTED = "functions.NAME:N with the calls counted through the conversation, as Kimi K2's templates read them"


def short_id(sent: str | None) -> str:
    """Return the id of a call in a history in the short form. Ids of other servers get one that follows from them."""
    return sent if sent and _is_short(sent) else hashlib.blake2b((sent or "").encode()).hexdigest()[:9]


def _is_short(id: str) -> bool:
    return len(id) == 9 and id.isascii() and id.isalnum()


@dataclass(slots=True)
class CallIds:
    """Makes the ids of one answer's calls. `used` are the ids of earlier calls in the conversation. Ids follow from the
    `seed`, so that a server that goes on with an answer makes the same; "" draws one."""

    form: CallIdForm = CallIdForm.LONG
    used: Iterable[str] = ()
    seed: str = ""
    _taken: set[str] = field(init=False)
    _num_calls: int = field(init=False)
    # The next count to try, by function if ids name it; lower ones are taken.
    _next_counts: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        used = list(self.used)
        self._taken, self._num_calls = set(used), len(used)
        self.seed = self.seed or uuid.uuid4().hex

    def next(self, name: str, own: str = "") -> str:
        """Return the id of a call of the function `name`. The model's `own` id is kept if it has the form and no other
        call has it."""
        new = own if own and own not in self._taken and self._fits(name, own) else self._new(name)
        self._taken.add(new)
        self._num_calls += 1
        return new

    def _fits(self, name: str, own: str) -> bool:
        if self.form is CallIdForm.SHORT:
            return _is_short(own)
        if self.form is CallIdForm.COUNTED:
            return own.startswith(f"functions.{name}:")
        return True

    def _new(self, name: str) -> str:
        key = name if self.form is CallIdForm.COUNTED else ""
        count = max(self._num_calls, self._next_counts.get(key, 0))
        while (new := self._id(name, count)) in self._taken:
            count += 1
        self._next_counts[key] = count + 1
        return new

    def _id(self, name: str, count: int) -> str:
        if self.form is CallIdForm.COUNTED:
            return f"functions.{name}:{count}"
        digits = hashlib.blake2b(f"{self.seed} {count}".encode(), digest_size=12).hexdigest()
        return digits[:9] if self.form is CallIdForm.SHORT else f"call_{digits}"


def with_counted_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a history with ids of calls in the counted form. Results get the new ids of their calls.
    Ids that have the form are kept."""
    ids, new_ids, result = CallIds(CallIdForm.COUNTED), dict[Any, str](), list[dict[str, Any]]()
    for message in messages:
        if calls := message.get("tool_calls"):
            counted = [
                {**call, "id": ids.next(call["function"].get("name", ""), call.get("id") or "")} for call in calls
            ]
            new_ids |= {call.get("id"): new["id"] for call, new in zip(calls, counted, strict=True)}
            message = {**message, "tool_calls": counted}
        if message.get("role") == "tool":
            message = {**message, "tool_call_id": new_ids.get(sent := message.get("tool_call_id"), sent)}
        result.append(message)
    return result
