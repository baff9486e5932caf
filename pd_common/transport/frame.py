"""The outside of every port's address: a magic, a version, a bound on the length and a digest, nothing of any library.

A receiver that is trusted to receive is trusted to know its own address: the digest finds damage, not malice.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from pd_common.errors import InvalidRequest

_HEADER = struct.Struct("<4sH")  # magic, version
_DIGEST_BYTES = 16
MAX_ADDRESS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    """How the addresses of one backend begin and end; `port` names them in messages, as in `UCX port`."""

    magic: bytes
    version: int
    port: str

    def seal(self, body: bytes | bytearray) -> bytes:
        """The body, framed.

        Raises:
            InvalidRequest: it is too long.
        """
        sealed = _HEADER.pack(self.magic, self.version) + bytes(body)
        if len(sealed) + _DIGEST_BYTES > MAX_ADDRESS_BYTES:
            raise InvalidRequest(f"the address of a {self.port} is too long", bytes=len(sealed))
        return sealed + _digest(sealed)

    def unseal(self, packed: bytes) -> bytes:
        """The inverse of `seal`.

        Raises:
            InvalidRequest: the bytes are not what `seal` makes.
        """
        if not _HEADER.size + _DIGEST_BYTES <= len(packed) <= MAX_ADDRESS_BYTES:
            raise InvalidRequest(f"not an address of a {self.port}: wrong length", bytes=len(packed))
        magic, version = _HEADER.unpack_from(packed)
        if magic != self.magic or version != self.version:
            raise InvalidRequest(f"not an address of a {self.port}, or of another version", version=version)
        if _digest(packed[:-_DIGEST_BYTES]) != packed[-_DIGEST_BYTES:]:
            raise InvalidRequest(f"the address of a {self.port} is damaged")
        return packed[_HEADER.size : -_DIGEST_BYTES]


def _digest(sealed: bytes) -> bytes:
    return hashlib.blake2b(sealed, digest_size=_DIGEST_BYTES).digest()
