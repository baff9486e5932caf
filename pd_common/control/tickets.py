"""Tickets: one room's permission, signed by the router and carried by both of the room's legs.

A ticket is 49 bytes: version, room and end (seconds since 1970, both 64 bits, big-endian), HMAC-SHA256 over them.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pd_common.control.files import Mounted
from pd_common.errors import InvalidRequest, PermissionDenied
from pd_common.types import BootstrapRoom

LEAST_KEY_BYTES = 32

_VERSION = 1
_DOMAIN = b"pd.v1 room ticket\0"
_BODY = struct.Struct(">BQQ")
_MAC_BYTES = hashlib.sha256().digest_size


def sign(key: bytes, room: BootstrapRoom, expires_unix_s: int) -> bytes:
    """The ticket of a room until this second, counted from 1970."""
    body = _BODY.pack(_VERSION, room, expires_unix_s)
    return body + _mac(key, body)


def check(keys: Sequence[bytes], ticket: bytes, room: int, now_unix_s: float, *, may_be_over: bool) -> None:
    """Accepts a ticket that one of the keys has signed for this room; `may_be_over` accepts it for ever.

    Raises:
        PermissionDenied: it is missing, forged, of another room, or over.

    """
    if not ticket:
        raise _denied(room, "needs a ticket")
    body, mac = ticket[:-_MAC_BYTES], ticket[-_MAC_BYTES:]
    signed = any(hmac.compare_digest(_mac(key, body), mac) for key in keys)
    if not signed or len(body) != _BODY.size or body[0] != _VERSION:
        raise _denied(room, "has a forged ticket, or one that another key has signed")
    _, ticket_room, expires_unix_s = _BODY.unpack(body)
    if ticket_room != room:
        raise _denied(room, f"came with the ticket of room {ticket_room}")
    if now_unix_s >= expires_unix_s and not may_be_over:
        raise _denied(room, f"has a ticket that is over since {now_unix_s - expires_unix_s:.0f} s by the clock here")


def _denied(room: int, why: str) -> PermissionDenied:
    return PermissionDenied(f"room {room} {why}", field="ticket", room=room)


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, _DOMAIN + body, "sha256")


@dataclass(frozen=True, slots=True)
class TicketKeys:
    """The keys that the processes share. The first signs, all verify, so that keys can be changed one by one."""

    _file: Mounted[tuple[bytes, ...]]

    @classmethod
    def read(cls, path: Path) -> TicketKeys:
        """Of a file with one key a line, which is followed when it changes.

        Raises:
            InvalidRequest: the file cannot be read, has no key, or has one that is too short.

        """
        return cls(Mounted([path], lambda: _keys_in(path)))

    def sign(self, room: BootstrapRoom, expires_unix_s: float) -> bytes:
        """The ticket of a room until this time, rounded down to seconds since 1970."""
        return sign(self._file.current()[0], room, int(expires_unix_s))

    def check(self, ticket: bytes, room: int, now_unix_s: float, *, may_be_over: bool) -> None:
        """As the function `check`."""
        check(self._file.current(), ticket, room, now_unix_s, may_be_over=may_be_over)


def _keys_in(path: Path) -> tuple[bytes, ...]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror or error}", field="ticket_key_file") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys or min(map(len, keys)) < LEAST_KEY_BYTES:
        raise InvalidRequest(
            f"{path} needs one key a line, each of at least {LEAST_KEY_BYTES} bytes", field="ticket_key_file"
        )
    return keys
