"""Counts that a server's front ends share: each writes its own number, and reads the sum of all."""

import mmap
from functools import partial
from typing import Self

ENGINE_REQUESTS, CONNECTIONS, REQUESTS_PER_S, WAITING_TOKENS = range(4)  # the last: and those of further engines


def num_bytes(num_front_ends: int, num_engines: int) -> int:
    """Return the length of the memory of a server's counts."""
    return 8 * num_front_ends * (WAITING_TOKENS + num_engines)


class SharedCounts:
    """The counts of one of `num_front_ends` front ends that share `memory`. Reading or writing a number is atomic."""

    def __init__(self, memory: mmap.mmap | bytearray, place: int = 0, num_front_ends: int = 1) -> None:
        self._cells = memoryview(memory).cast("d")
        self._place, self._size = place, len(self._cells) // num_front_ends
        self._is_alone = num_front_ends == 1

    @classmethod
    def alone(cls) -> Self:
        """Return the counts of a server's only front end."""
        return cls(bytearray(num_bytes(1, 1)))

    def share(self, what: int, own: float) -> float:
        """Set this front end's count, and return the sum of all."""
        self._cells[self._place * self._size + what] = own
        return own if self._is_alone else self.total(what)

    def total(self, what: int) -> float:
        return sum(self._cells[what :: self._size])

    def sharing(self, what: int) -> partial[float]:
        return partial(self.share, what)

    def clear(self) -> None:
        """Set this front end's counts to 0, after it has ended."""
        for what in range(self._size):
            self.share(what, 0)
