"""The bytes by which a receiver tells a sender how to reach one port: layout and limits, nothing of UCX."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pd_common.errors import InvalidRequest
from pd_common.transport.base import MemoryRegion
from pd_common.transport.frame import Frame

_FRAME = Frame(b"PDUX", 1, "UCX port")
_HEADER = struct.Struct("<II")  # bytes of the worker's address, regions
_REGION = struct.Struct("<QQH")  # base, length, bytes of the remote key
_MAX_REGIONS = 4096
_MAX_MEMORY = 1 << 63


@dataclass(frozen=True, slots=True)
class OfferedRegion:
    """A range of the receiver's memory and the key that opens it."""

    region: MemoryRegion
    rkey: bytes


@dataclass(frozen=True, slots=True)
class PortAddress:
    """One port; its offered regions are sorted by address.

    `probe` is a range without meaning: a new connection is tried by writing there.
    """

    worker: bytes
    probe: OfferedRegion
    offered: tuple[OfferedRegion, ...]

    def pack(self) -> bytes:
        regions = (self.probe, *self.offered)
        body = bytearray(_HEADER.pack(len(self.worker), len(regions)))
        body += self.worker
        for offered in regions:
            body += _REGION.pack(offered.region.base, offered.region.length, len(offered.rkey)) + offered.rkey
        if len(regions) > _MAX_REGIONS:
            raise InvalidRequest("too many regions for one port", regions=len(regions))
        return _FRAME.seal(body)

    @staticmethod
    def parse(packed: bytes) -> PortAddress:
        """The inverse of `pack`.

        Raises:
            InvalidRequest: the bytes are not what `pack` makes.
        """
        body = _FRAME.unseal(packed)
        if len(body) < _HEADER.size:
            raise InvalidRequest("the address of a UCX port is cut off")
        worker_bytes, count = _HEADER.unpack_from(body)
        if not worker_bytes or not 1 <= count <= _MAX_REGIONS:
            raise InvalidRequest("the address of a UCX port lacks its worker or its regions", regions=count)
        worker = body[_HEADER.size : _HEADER.size + worker_bytes]
        probe, *offered = _parse_regions(body, _HEADER.size + worker_bytes, count)
        return PortAddress(worker, probe, tuple(sorted(offered, key=lambda each: each.region.base)))


def _parse_regions(body: bytes, offset: int, count: int) -> list[OfferedRegion]:
    regions = []
    for _ in range(count):
        if offset + _REGION.size > len(body):
            raise InvalidRequest("the address of a UCX port is cut off")
        base, length, rkey_bytes = _REGION.unpack_from(body, offset)
        offset += _REGION.size + rkey_bytes
        if not length or base + length > _MAX_MEMORY or not rkey_bytes:
            raise InvalidRequest("a UCX port offers an impossible region", base=base, length=length)
        regions.append(OfferedRegion(MemoryRegion(base, length), body[offset - rkey_bytes : offset]))
    if offset != len(body):
        raise InvalidRequest("the address of a UCX port does not end where it should")
    return regions
