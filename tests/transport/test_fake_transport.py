from __future__ import annotations

import numpy as np
import pytest

from pd_common.errors import InvalidRequest
from pd_common.transport.backends import open_transport
from pd_common.transport.base import Puts
from tests.transport.pairs import Memory, transport_config


async def test_the_fake_backend_takes_everything_and_moves_nothing() -> None:
    transport = open_transport(transport_config("fake"))
    memory = Memory(64)
    transport.register(memory.region)
    assert (transport.info.backend, transport.info.transports) == ("fake", ())
    port = transport.listen([memory.region])
    channel = await transport.connect(port.address)
    assert channel.carrier == "fake"
    one = np.array([memory.region.base], dtype=np.int64)
    receipt = await channel.write(Puts(one, one + 32, np.array([32], dtype=np.int64)))
    assert (receipt.bytes, receipt.descriptors) == (32, 1)
    await port.fence()
    await channel.close()
    await transport.close()


async def test_the_fake_backend_pairs_with_its_like_alone() -> None:
    transport = open_transport(transport_config("fake"))
    with pytest.raises(InvalidRequest, match="--transfer-backend fake"):
        await transport.connect(b"anything")
    await transport.close()
