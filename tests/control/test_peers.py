from __future__ import annotations

import time
from typing import Any

from pd.v1 import transfer_status_pb2, transfer_status_pb2_grpc, types_pb2

from pd_common.control import server
from pd_common.control.outputs import OutputHub
from pd_common.control.peers import Peer
from pd_common.control.status_servicer import TransferStatusServicer
from pd_common.handoff.canary import Canary
from pd_common.types import Instance, Role
from tests.control.fake_rooms import FakeRooms
from tests.control.serving import serving


async def test_every_pairing_is_listed_with_its_canary_in_times_of_the_wall() -> None:
    rooms = FakeRooms(OutputHub())
    now = time.monotonic()
    rooms.paired = (
        Peer(Instance("p", 3), Role.PREFILL, "h:1", "cma", now - 60, Canary(now - 5, 0.002), live_rooms=2),
        Peer(Instance("q", 4), Role.PREFILL, "h:2", "tcp/eth0", now - 1, None, live_rooms=0),
    )
    async with serving(server.transfer_status(TransferStatusServicer(rooms))) as connection:
        stub: Any = transfer_status_pb2_grpc.TransferStatusStub(connection.channel)
        first, second = (await stub.ListPeers(transfer_status_pb2.ListPeersRequest())).peers
    assert (first.instance.instance_id, first.instance.epoch, first.role) == ("p", 3, types_pb2.ROLE_PREFILL)
    assert (first.control_address, first.carrier, first.live_rooms) == ("h:1", "cma", 2)
    assert abs(time.time() - 60 - first.since.ToNanoseconds() / 1e9) < 5
    assert abs(time.time() - 5 - first.canary_time.ToNanoseconds() / 1e9) < 4
    assert first.canary_took.ToMilliseconds() == 2
    assert not second.HasField("canary_time")
    assert not second.HasField("canary_took")
