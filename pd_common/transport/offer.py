"""The address of a port whose regions need no keys: how to reach the peer in its library's words, and its regions."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pd_common.errors import InvalidRequest
from pd_common.transport.base import MemoryRegion
from pd_common.transport.frame import Frame

_HEADER = struct.Struct("<II")  # bytes of `peer`, regions
_REGION = struct.Struct("<QQ")  # base, length
_MAX_REGIONS = 4096
_MAX_MEMORY = 1 << 63


@dataclass(frozen=True, slots=True)
class KeylessOffer:
    """One port; its offered regions are sorted by address.

    `peer` is opaque here; `probe` is a range without meaning: a new connection is tried by writing there.
    """

    peer: bytes
    probe: MemoryRegion
    offered: tuple[MemoryRegion, ...]

    def pack(self, frame: Frame) -> bytes:
        """As bytes for the wire.

        Raises:
            InvalidRequest: there are too many regions, or the address is too long.
        """
        regions = (self.probe, *self.offered)
        if len(regions) > _MAX_REGIONS:
            raise InvalidRequest("too many regions for one port", regions=len(regions))
        packed = [_REGION.pack(region.base, region.length) for region in regions]
        return frame.seal(b"".join([_HEADER.pack(len(self.peer), len(regions)), self.peer, *packed]))

    @staticmethod
    def parse(packed: bytes, frame: Frame) -> KeylessOffer:
        """The inverse of `pack`.

        Raises:
            InvalidRequest: the bytes are not what `pack` makes.
        """
        body = frame.unseal(packed)
        if len(body) < _HEADER.size:
            raise InvalidRequest(f"the address of a {frame.port} is cut off")
        peer_bytes, count = _HEADER.unpack_from(body)
        regions_at = _HEADER.size + peer_bytes
        if not peer_bytes or not 1 <= count <= _MAX_REGIONS or len(body) != regions_at + count * _REGION.size:
            raise InvalidRequest(f"the address of a {frame.port} lacks its peer or its regions", regions=count)
        probe, *offered = [MemoryRegion(*fields) for fields in _REGION.iter_unpack(body[regions_at:])]
        for region in (probe, *offered):
            if not region.length or region.base + region.length > _MAX_MEMORY:
                facts = {"base": region.base, "length": region.length}
                raise InvalidRequest(f"a {frame.port} offers an impossible region", **facts)
        return KeylessOffer(body[_HEADER.size : regions_at], probe, tuple(sorted(offered, key=lambda each: each.base)))
