"""Stop strings, which may cross tokens. Stop tokens are in `octavo.scheduling.stop_tokens`."""


class StopStrings:
    """Finds stop strings in a growing text, and says how much of it may be shown."""

    def __init__(self, stop: list[str], include_in_output: bool) -> None:
        self._stop = stop
        self._include_in_output = include_in_output

    def find(self, text: str, num_new: int) -> tuple[str, int] | None:
        """Return the stop string that ends first in `text`, whose last `num_new` characters are new, and where to cut
        the text."""
        old = len(text) - num_new
        found = [(at + len(s), at, s) for s in self._stop if (at := text.find(s, max(0, old - len(s) + 1))) >= 0]
        if not found:
            return None
        end, at, stop = min(found)
        return stop, end if self._include_in_output else at

    def num_held_back(self, text: str) -> int:
        """Return how many characters at the end of `text` may begin a stop string, and so cannot be shown yet."""
        if self._include_in_output:
            return 0
        held = 0
        for stop in self._stop:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            if at >= 0:
                held = max(held, len(text) - at)
        return held
