"""The fields of one API by their names in another. Requests of Messages, Responses and Ollama become chats, and errors
about a chat's field name the field that the client has sent."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from octavo.errors import RequestError

# A value in quotes, as `repr` writes it; the end of a long one may be cut off. Apostrophes in words are no quotes.
_QUOTED = r"""(?<!\w)(?P<quote>['"])(?:\\.|(?!(?P=quote)).)*(?:(?P=quote)|\Z)"""


class FieldNames:
    """`names` maps names of an error to those of the client's API. `[]` in both stands for the same index in a list.

    A name that is no plain word (`max_tokens`, `tools[].function.name`) is found anywhere in a message except within
    quotes, which hold the client's values. A plain word (`stop`) is found only at the beginning of a message, where it
    is the subject.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        longest_first = sorted(names, key=len, reverse=True)
        anywhere = [_pattern(name) for name in longest_first if not name.isalpha()]
        at_start = [_pattern(name) for name in longest_first if name.isalpha()]
        alternatives = [rf"(?<![\w.\]])(?:{'|'.join(anywhere)})"] if anywhere else []
        alternatives += [rf"\A(?:{'|'.join(at_start)})"] if at_start else []
        self._found = re.compile(rf"{_QUOTED}|(?P<name>{'|'.join(alternatives)})(?!\w)", re.DOTALL)

    def in_text(self, text: str) -> str:
        """Return a message with the names of the client's API."""
        return self._found.sub(self._replace, text)

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Context: a `RequestError` that leaves the block names the fields of the client's API."""
        try:
            yield
        except RequestError as error:
            raise self.renamed(error) from None

    def renamed(self, error: RequestError) -> RequestError:
        """Make an error name the fields of the client's API, and return it."""
        error.args = (self.in_text(str(error)),)
        if error.param is not None:
            error.param = self.in_text(error.param)
        return error

    def _replace(self, found: re.Match[str]) -> str:
        if found["name"] is None:
            return found[0]
        index = re.search(r"\[\d+\]", found[0])
        if index is None:
            return self._names[found[0]]
        return self._names[found[0].replace(index[0], "[]", 1)].replace("[]", index[0], 1)


def _pattern(name: str) -> str:
    return re.escape(name).replace(re.escape("[]"), r"\[\d+\]")
