"""The bytes by which a receiver tells a sender how to reach one port: NIXL's metadata as it is, and our own regions.

What may be written is decided by the regions here; NIXL's metadata holds the keys for them and is never looked into.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pd_common.errors import InvalidRequest
from pd_common.transport.base import MemoryRegion
from pd_common.transport.frame import Frame

_FRAME = Frame(b"PDNX", 1, "NIXL port")
_HEADER = struct.Struct("<II")  # bytes of metadata, regions
_REGION = struct.Struct("<QQ")  # base, length
_MAX_REGIONS = 4096
_MAX_MEMORY = 1 << 63


@dataclass(frozen=True, slots=True)
class PortAddress:
    """One port; its offered regions are sorted by address.

    `probe` is a range without meaning: a new connection is tried by writing there.
    """

    metadata: bytes
    probe: MemoryRegion
    offered: tuple[MemoryRegion, ...]

    def pack(self) -> bytes:
        regions = (self.probe, *self.offered)
        if len(regions) > _MAX_REGIONS:
            raise InvalidRequest("too many regions for one port", regions=len(regions))
        body = bytearray(_HEADER.pack(len(self.metadata), len(regions)) + self.metadata)
        for region in regions:
            body += _REGION.pack(region.base, region.length)
        return _FRAME.seal(body)

    @staticmethod
    def parse(packed: bytes) -> PortAddress:
        """The inverse of `pack`.

        Raises:
            InvalidRequest: the bytes are not what `pack` makes.
        """
        body = _FRAME.unseal(packed)
        if len(body) < _HEADER.size:
            raise InvalidRequest("the address of a NIXL port is cut off")
        metadata_bytes, count = _HEADER.unpack_from(body)
        regions_at = _HEADER.size + metadata_bytes
        if not metadata_bytes or not 1 <= count <= _MAX_REGIONS or len(body) != regions_at + count * _REGION.size:
            raise InvalidRequest("the address of a NIXL port lacks its metadata or its regions", regions=count)
        probe, *offered = [MemoryRegion(*fields) for fields in _REGION.iter_unpack(body[regions_at:])]
        for region in (probe, *offered):
            if not region.length or region.base + region.length > _MAX_MEMORY:
                raise InvalidRequest("a NIXL port offers an impossible region", base=region.base, length=region.length)
        return PortAddress(
            body[_HEADER.size : regions_at], probe, tuple(sorted(offered, key=lambda region: region.base))
        )
