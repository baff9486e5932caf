"""Server-sent events out of a stream of bytes, wherever the pieces are cut."""

from __future__ import annotations


class EventParser:
    """Keeps what is not a whole event yet. Only `data` matters here: comments and other fields are passed over."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that ends within this piece."""
        *lines, self._line = (self._line + piece).split(b"\n")
        events = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._data.append(text[len(b"data:") :].removeprefix(b" "))
            elif not text and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
