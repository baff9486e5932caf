"""The bytes by which a receiver tells a sender how to reach one port: where its engine listens, and what it offers.

Mooncake has no keys: what may be written is decided by the regions here, and by the engine that has registered them.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from pd_common.errors import InvalidRequest
from pd_common.transport.base import MemoryRegion
from pd_common.transport.frame import Frame

_FRAME = Frame(b"PDMC", 1, "Mooncake port")
_HEADER = struct.Struct("<HI")  # bytes of the target, regions
_REGION = struct.Struct("<QQ")  # base, length
_TARGET = re.compile(rb"[A-Za-z0-9._-]{1,253}:[0-9]{1,5}")
_MAX_REGIONS = 4096
_MAX_MEMORY = 1 << 63


@dataclass(frozen=True, slots=True)
class PortAddress:
    """One port; its offered regions are sorted by address.

    `target` is host:port of its engine; `probe` is a range without meaning: a new connection is tried by writing there.
    """

    target: str
    probe: MemoryRegion
    offered: tuple[MemoryRegion, ...]

    def pack(self) -> bytes:
        regions = (self.probe, *self.offered)
        if len(regions) > _MAX_REGIONS:
            raise InvalidRequest("too many regions for one port", regions=len(regions))
        target = self.target.encode()
        packed = [_REGION.pack(region.base, region.length) for region in regions]
        return _FRAME.seal(b"".join([_HEADER.pack(len(target), len(regions)), target, *packed]))

    @staticmethod
    def parse(packed: bytes) -> PortAddress:
        """The inverse of `pack`.

        Raises:
            InvalidRequest: the bytes are not what `pack` makes.
        """
        body = _FRAME.unseal(packed)
        if len(body) < _HEADER.size:
            raise InvalidRequest("the address of a Mooncake port is cut off")
        target_bytes, count = _HEADER.unpack_from(body)
        regions_at = _HEADER.size + target_bytes
        target = body[_HEADER.size : regions_at]
        if not 1 <= count <= _MAX_REGIONS or len(body) != regions_at + count * _REGION.size:
            raise InvalidRequest("the address of a Mooncake port lacks its regions", regions=count)
        if not _TARGET.fullmatch(target) or not 0 < int(target.rpartition(b":")[2]) < 65536:
            raise InvalidRequest("the address of a Mooncake port names no host and port")
        probe, *offered = [MemoryRegion(*fields) for fields in _REGION.iter_unpack(body[regions_at:])]
        for region in (probe, *offered):
            if not region.length or region.base + region.length > _MAX_MEMORY:
                raise InvalidRequest(
                    "a Mooncake port offers an impossible region", base=region.base, length=region.length
                )
        return PortAddress(target.decode(), probe, tuple(sorted(offered, key=lambda region: region.base)))
