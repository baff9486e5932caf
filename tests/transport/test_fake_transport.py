from __future__ import annotations

import pytest

from pd_common.errors import InvalidRequest
from pd_common.transport.backends import open_transport
from tests.transport.pairs import Memory, transport_config


async def test_the_fake_backend_takes_memory_and_moves_nothing() -> None:
    transport = open_transport(transport_config("fake"))
    memory = Memory(64)
    transport.register(memory.region)
    assert (transport.info.backend, transport.info.transports) == ("fake", ())
    with pytest.raises(InvalidRequest, match="--transfer-backend fake"):
        transport.listen([memory.region])
    with pytest.raises(InvalidRequest, match="--transfer-backend fake"):
        await transport.connect(b"anything")
    await transport.close()
