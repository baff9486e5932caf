"""The bytes by which a receiver tells a sender how to reach one port: where its engine listens, and what it offers.

Mooncake has no keys: what may be written is decided by the regions here, and by the engine that has registered them.
"""

from __future__ import annotations

import re

from pd_common.errors import InvalidRequest
from pd_common.transport.frame import Frame
from pd_common.transport.offer import KeylessOffer

FRAME = Frame(b"PDMC", 2, "Mooncake port")
_TARGET = re.compile(rb"[A-Za-z0-9._-]{1,253}:[0-9]{1,5}")


def target_of(offer: KeylessOffer) -> str:
    """host:port of the peer's engine.

    Raises:
        InvalidRequest: it is none.
    """
    if not _TARGET.fullmatch(offer.peer) or not 0 < int(offer.peer.rpartition(b":")[2]) < 65536:
        raise InvalidRequest("the address of a Mooncake port names no host and port")
    return offer.peer.decode()
