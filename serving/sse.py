"""Server-sent events, split as they arrive (WHATWG HTML, section 9.2)."""

import re

_END = re.compile(rb"\r?\n\r?\n")


class EventSplitter:
    """Cuts a byte stream into events; what was fed at which boundary does not change the events."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes, each with the blank line that ends it."""
        # The end of an event is at most four bytes, so at most three of them came earlier.
        search_from = max(0, len(self._pending) - 3)
        self._pending += data
        events, start = [], 0
        while end := _END.search(self._pending, max(start, search_from)):
            events.append(bytes(self._pending[start : end.end()]))
            start = end.end()
        del self._pending[:start]
        return events

    def rest(self) -> bytes:
        """What is left of an event that never ended; it is given out once."""
        rest = bytes(self._pending)
        self._pending.clear()
        return rest


def payload(event: bytes) -> bytes | None:
    """The data of an event that is one `data:` line, else None."""
    line = event.strip(b"\r\n")
    if not line.startswith(b"data:") or b"\n" in line:
        return None
    return line[5:].strip()
