"""How long prefill and decode took to find each other over a room, from the record that prefill keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pd.v1 import transfer_status_pb2, transfer_status_pb2_grpc, types_pb2

from pd_common.cli.bench.control.load import RoomTimes
from pd_common.control.connection import Connection
from pd_common.types import BootstrapAddress

_PAGE = 1000


async def handshakes(prefill: BootstrapAddress, rooms: Sequence[RoomTimes]) -> list[float]:
    """Seconds from sending both legs of each room until prefill had the request and decode's pages for it."""
    sent_s = {int(times.room): times.sent_s for times in rooms}
    return [
        entered_s - sent_s[number] for number, entered_s in (await _waiting_since(prefill)).items() if number in sent_s
    ]


async def _waiting_since(prefill: BootstrapAddress) -> dict[int, float]:
    """When each room on record became WAITING_FOR_INPUT, in seconds since 1970."""
    connection = Connection(prefill.target)
    stub: Any = transfer_status_pb2_grpc.TransferStatusStub(connection.channel)
    found: dict[int, float] = {}
    token = ""
    try:
        while True:
            request = transfer_status_pb2.ListTransfersRequest(page_size=_PAGE, page_token=token)
            answer = await connection.call(stub.ListTransfers, request)
            for transfer in answer.transfers:
                for step in transfer.timeline:
                    if step.state == types_pb2.TRANSFER_STATE_WAITING_FOR_INPUT:
                        found[transfer.bootstrap_room] = step.time.ToNanoseconds() / 1e9
            token = answer.next_page_token
            if not token:
                return found
    finally:
        await connection.close()
