"""Reads server-sent events as bytes arrive, for Octavo's own clients: the terminal and the benchmark."""


class EventReader:
    """Takes the bytes of one stream and returns the data of its events. Comments, names, ids and events without data
    are skipped (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

    def __init__(self) -> None:
        self._rest = b""  # an incomplete event
        self._ends_with_cr = False  # a following line feed belongs to the carriage return

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that `data` completes."""
        if data:
            if self._ends_with_cr:
                data = data.removeprefix(b"\n")
                self._ends_with_cr = False
            if b"\r" in data:
                self._ends_with_cr = data.endswith(b"\r")
                data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return [found for event in events if (found := _data_of(event)) is not None]


def _data_of(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly all events
        return event[6:]
    lines = []
    for line in event.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines) if lines else None
